"""GET /api/tags, /api/ps and /api/version, POST /api/show, and the routes by which Ollama's clients change models.

Owns: what is said of the served model in this API's words.  Does not know: files, how a model is loaded.
"""

from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from engine.settings.sections import ServerSection
from engine.types.errors import FieldError, RequestError
from server.extensions.ollama.names import LATEST, served_name
from server.extensions.ollama.objects import (
    LoadedAnswer,
    LoadedModel,
    ModelDetails,
    OllamaError,
    OllamaModel,
    ShowAnswer,
    TagsAnswer,
    VersionAnswer,
)
from server.extensions.ollama.requests import ShowBody
from server.http.body import BodyReader
from server.http.operation import operation
from server.http.replies import json_reply
from server.openai.translator import Translator

# The version of Ollama whose API this is: clients compare it before they use what newer ones have.
VERSION = "0.12.0"
NEVER = "9999-12-31T23:59:59Z"
ARCHITECTURE = "callboard"


class OllamaRoutes:
    """Handles all of them."""

    def __init__(self, translator: Translator, server: ServerSection) -> None:
        self._translator = translator
        self._show = BodyReader(ShowBody, self._shown, server)

    @operation("GET", "/api/tags", "client", "The served models, as Ollama has them.", answer=TagsAnswer)
    async def tags(self, request: web.Request) -> web.Response:
        return json_reply(TagsAnswer([OllamaModel(**self._model(name)) for name in self._names()]))

    @operation("GET", "/api/ps", "client", "The models in memory, as Ollama has them.", answer=LoadedAnswer)
    async def loaded(self, request: web.Request) -> web.Response:
        most = self._translator.card.max_model_len
        models = [LoadedModel(**self._model(one), expires_at=NEVER, context_length=most) for one in self._names()]
        return json_reply(LoadedAnswer(models))

    @operation("GET", "/api/version", "open", "The version of Ollama whose API this is.", answer=VersionAnswer)
    async def version(self, request: web.Request) -> web.Response:
        return json_reply(VersionAnswer(VERSION))

    @operation(
        "POST",
        "/api/show",
        "client",
        "What a model is and can do, as Ollama has it.",
        answer=ShowAnswer,
        body=ShowBody,
        error=OllamaError,
    )
    async def show(self, request: web.Request) -> web.Response:
        return json_reply(await self._show.read(request))

    @operation("POST", "/api/pull", "client", "Refused: models are chosen when the server starts.", error=OllamaError)
    @operation("POST", "/api/push", "client", error=OllamaError)
    @operation("POST", "/api/create", "client", error=OllamaError)
    @operation("POST", "/api/copy", "client", error=OllamaError)
    @operation("DELETE", "/api/delete", "client", error=OllamaError)
    async def refuse(self, request: web.Request) -> web.Response:
        """Raises RequestError."""
        raise RequestError(
            f"models are neither fetched nor changed over HTTP; this server has {', '.join(self._names())}, "
            "and model.path in its configuration names another",
            code="unsupported",
        )

    def _names(self) -> list[str]:
        return [self._translator.card.name, *self._translator.variants]

    def _model(self, name: str) -> dict[str, Any]:
        full = name if ":" in name else name + LATEST
        return {"name": full, "model": full, "modified_at": self._created(), "details": self._details()}

    def _created(self) -> str:
        return datetime.fromtimestamp(self._translator.card.created, UTC).isoformat().replace("+00:00", "Z")

    def _details(self) -> ModelDetails:
        return ModelDetails(parent_model="", family=ARCHITECTURE, families=[ARCHITECTURE])

    def _shown(self, body: ShowBody) -> ShowAnswer:
        """Returns what is said of a model.  Raises RequestError."""
        name = body.model or body.name
        if not name:
            raise FieldError("model", "required, but not given")
        served_name(name, self._translator)
        card = self._translator.card
        able = {"generate": ["completion", "tools"], "embed": ["embedding"], "classify": []}[card.use.kind]
        if card.reasoning_parser != "none":
            able = [*able, "thinking"]
        defaults = card.chat_defaults.items()
        return ShowAnswer(
            modified_at=self._created(),
            parameters="\n".join(f"{key} {value}" for key, value in defaults),
            details=self._details(),
            model_info={
                "general.architecture": ARCHITECTURE,
                "general.basename": card.name,
                f"{ARCHITECTURE}.context_length": card.max_model_len,
                f"{ARCHITECTURE}.vocab_size": card.vocab_size,
            },
            capabilities=able,
        )
