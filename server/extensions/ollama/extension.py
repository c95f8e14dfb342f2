"""Ollama's API as a part of the server."""

from server.extensions.ollama.catalogue import OllamaRoutes
from server.extensions.ollama.embeddings import OldEmbeddings, OllamaEmbed
from server.extensions.ollama.endpoints import OllamaChat, OllamaGenerate
from server.extensions.ollama.objects import ollama_errors
from server.run.extension import Extension, ServerParts

NAMES = ("chat", "generate", "embed", "tags", "ps", "show", "version", "pull", "push", "create", "copy", "delete")


class OllamaExtension(Extension):
    """The routes below /api that clients of Ollama call."""

    endpoints = (OllamaChat, OllamaGenerate, OllamaEmbed, OldEmbeddings)
    handlers = (OllamaRoutes,)
    error_formats = dict.fromkeys((f"/api/{name}" for name in NAMES), ollama_errors)

    def join(self, parts: ServerParts) -> None:
        parts.routes.add(OllamaRoutes(parts.translator, parts.server))


EXTENSION = OllamaExtension()
