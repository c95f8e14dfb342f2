"""GET /v1/models and /v1/models/{id}.

Owns: what is said about the served model and its adapters.  Does not know: how they are served.
"""

from datetime import UTC, datetime

from aiohttp import web

from server.http.operation import operation
from server.http.replies import json_reply
from server.openai.answers import ModelBody, ModelList, model_list
from server.openai.translator import Translator


class ModelRoutes:
    """Handles both."""

    def __init__(self, translator: Translator) -> None:
        self._translator = translator

    @operation("GET", "/v1/models", "client", "The served models and their adapters.", answer=ModelList)
    async def all(self, request: web.Request) -> web.Response:
        names = (self._translator.card.name, *self._translator.variants)
        return json_reply(model_list([self._body(name) for name in names]))

    @operation("GET", "/v1/models/{id:.+}", "client", "A served model, or an adapter.", answer=ModelBody)
    async def one(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        self._translator.check_model(name)
        return json_reply(self._body(name))

    def _body(self, name: str) -> ModelBody:
        card, variant = self._translator.card, self._translator.variants.get(name)
        created = card.created if variant is None else variant.created
        return ModelBody(
            id=name,
            display_name=name,
            created=created,
            created_at=datetime.fromtimestamp(created, UTC),
            max_model_len=card.max_model_len,
            kind=card.use.kind,
            root=card.name,
            parent=None if variant is None else card.name,
        )
