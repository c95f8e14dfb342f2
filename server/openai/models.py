"""GET /v1/models and /v1/models/{id}.

Owns: what is said about the served model.  Does not know: how it is served.
"""

from aiohttp import web

from server.http.replies import json_reply
from server.openai.answers import ModelBody, ModelList
from server.openai.translator import Translator


class ModelRoutes:
    """Handles both."""

    def __init__(self, translator: Translator) -> None:
        card = translator.card
        self._model = ModelBody(
            id=card.name,
            created=card.created,
            max_model_len=card.max_model_len,
            kind=card.pooling.kind,
            root=card.name,
        )
        self._translator = translator

    async def all(self, request: web.Request) -> web.Response:
        return json_reply(ModelList(data=[self._model]))

    async def one(self, request: web.Request) -> web.Response:
        self._translator.check_model(request.match_info["id"])
        return json_reply(self._model)
