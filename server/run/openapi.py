"""GET /openapi.json: what the API takes and gives, generated from the types that decode and encode it.

Owns: which types belong to which route.  Does not know: what handlers do.
"""

from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from engine.control.changeover import Outcome
from server.access import access
from server.anthropic.objects import MessageError, MessageEvent, MessageObject, TokenCountAnswer
from server.anthropic.requests import CountBody, MessagesBody
from server.batches.objects import BatchBody, BatchObject
from server.http.exchange import Handler
from server.http.replies import ErrorBody
from server.native.bodies import NativeBody, NativeOutput
from server.openai.answers import ChatChunk, ChatCompletion, Completion, ModelBody, ModelList
from server.openai.requests import ChatBody, CompletionBody
from server.openai.tokenization import DetokenizeAnswer, DetokenizeBody, TokenizeAnswer, TokenizeBody, TokenizerInfo
from server.operators.adapters import LOAD, UNLOAD, AdapterAnswer, LoadBody, UnloadBody
from server.operators.administration import AbortAnswer, AbortBody, ResetAnswer
from server.operators.explain import ExplanationBody
from server.operators.profiling import ProfileAnswer
from server.operators.recording import PATH as RECORDING
from server.operators.recording import RecordingAnswer
from server.operators.settings import ApplyBody, Sleeping
from server.operators.status import HealthBody, Load, ModelInfo, ServerInfo
from server.pooling.classify import ClassificationList, ClassifyBody
from server.pooling.embeddings import EmbeddingBody, EmbeddingList
from server.pooling.pairs import Ranking, RerankBody, ScoreBody, ScoreList
from server.pooling.raw import PoolingBody, PoolingList
from server.responses.objects import Event, ResponseObject
from server.responses.requests import ResponsesBody
from server.storage.files import Deleted, FileObject
from server.storage.pages import ListPage
from server.storage.routes import BATCHES, FILES
from server.storage.uploads import MULTIPART

REFERENCE = "#/components/schemas/{name}"
JSON = "application/json"
STREAM = "text/event-stream"
BINARY = "application/octet-stream"
NAMED_EVENTS = (Event, MessageEvent)  # a stream of them ends without a word of its own
ERRORS = {
    "400": "A value or the body is wrong; param names the field.",
    "401": "The API key is missing or wrong.",
    "403": "A page of another site, or a key that is not an operator's.",
    "404": "There is no such model, file, batch or response.",
    "408": "The body did not arrive in time.",
    "409": "The request was aborted; what it names is in use or has ended.",
    "413": "The body is too large.",
    "415": "The body is not JSON, or compressed.",
    "429": "Too many requests are open; see Retry-After.",
    "500": "The server failed.",
    "503": "The server cannot take requests now; see Retry-After.",
    "504": "The request took too long.",
    "507": "The server's disk is full.",
}


class Operation(NamedTuple):
    """A route.  answer: the type of what comes in one piece; None for nothing but a stream.

    event: what its stream is made of, if it streams.  error: the body of its errors.
    form: the fields of a body that has a file, as OpenAPI has them."""

    method: str
    path: str
    summary: str
    answer: Any
    body: type[msgspec.Struct] | None = None
    event: Any = None
    error: type[msgspec.Struct] = ErrorBody
    form: dict[str, Any] | None = None


UPLOAD = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer"},
    },
    "required": ["file", "purpose"],
}
NATIVE = NativeOutput | list[NativeOutput]
OPERATIONS = (
    Operation("post", "/v1/chat/completions", "Answer a conversation.", ChatCompletion, ChatBody, ChatChunk),
    Operation("post", "/v1/completions", "Continue prompts.", Completion, CompletionBody, Completion),
    Operation("post", "/v1/responses", "Answer a conversation, as items.", ResponseObject, ResponsesBody, Event),
    Operation("get", "/v1/responses/{id}", "A stored response.", ResponseObject),
    Operation("delete", "/v1/responses/{id}", "Let go of a stored response.", Deleted),
    Operation("post", "/v1/responses/{id}/cancel", "End a response in the background.", ResponseObject),
    Operation("get", "/v1/responses/{id}/input_items", "What a response was the answer to.", ListPage),
    Operation("post", FILES, "Store a file.", FileObject, form=UPLOAD),
    Operation("get", FILES, "The client's files.", ListPage),
    Operation("get", FILES + "/{id}", "What is known of a file.", FileObject),
    Operation("get", FILES + "/{id}/content", "What is in a file.", bytes),
    Operation("delete", FILES + "/{id}", "Let go of a file.", Deleted),
    Operation("post", BATCHES, "Answer the requests of a file.", BatchObject, BatchBody),
    Operation("get", BATCHES, "The client's batches.", ListPage),
    Operation("get", BATCHES + "/{id}", "How far a batch is.", BatchObject),
    Operation("post", BATCHES + "/{id}/cancel", "Run no more of a batch.", BatchObject),
    Operation("post", "/v1/embeddings", "Texts as vectors.", EmbeddingList, EmbeddingBody),
    Operation("post", "/classify", "Texts as probabilities of labels.", ClassificationList, ClassifyBody),
    Operation("post", "/v1/score", "How well texts fit another.", ScoreList, ScoreBody),
    Operation("post", "/v1/rerank", "Documents in the order in which they fit a query.", Ranking, RerankBody),
    Operation("post", "/pooling", "Whatever a model gives that is no text.", PoolingList, PoolingBody),
    Operation(
        "post",
        "/v1/messages",
        "Answer a conversation, as blocks.",
        MessageObject,
        MessagesBody,
        MessageEvent,
        MessageError,
    ),
    Operation("post", "/v1/messages/count_tokens", "Count a prompt.", TokenCountAnswer, CountBody, error=MessageError),
    Operation("post", "/generate", "Continue prompts.", NATIVE, NativeBody, NativeOutput),
    Operation("get", "/v1/streams/{id}", "Go on with a stream, behind Last-Event-ID.", None, event=dict[str, Any]),
    Operation("post", "/tokenize", "Text as tokens.", TokenizeAnswer, TokenizeBody),
    Operation("post", "/detokenize", "Tokens as text.", DetokenizeAnswer, DetokenizeBody),
    Operation("get", "/tokenizer_info", "Special tokens and the chat template.", TokenizerInfo),
    Operation("get", "/v1/models", "The served models and their adapters.", ModelList),
    Operation("get", "/v1/models/{id}", "A served model, or an adapter.", ModelBody),
    Operation("post", "/abort_request", "End requests.", AbortAnswer, AbortBody),
    Operation("post", "/reset_prefix_cache", "Forget what is cached.", ResetAnswer),
    Operation("post", "/apply", "Change the settings.", Outcome, ApplyBody),
    Operation("post", "/sleep", "Let the engine rest.", Sleeping),
    Operation("post", "/wake_up", "End that.", Sleeping),
    Operation("get", "/is_sleeping", "Whether it rests.", Sleeping),
    Operation("post", LOAD, "Serve an adapter.", AdapterAnswer, LoadBody),
    Operation("post", UNLOAD, "Serve an adapter no more.", AdapterAnswer, UnloadBody),
    Operation("post", "/start_profile", "Record steps for a profiler.", ProfileAnswer),
    Operation("post", "/stop_profile", "Write what is recorded.", ProfileAnswer),
    Operation("get", "/explain/{id}", "Where the time of a request went.", ExplanationBody),
    Operation("post", RECORDING, "Write what the scheduler was told lately to a file.", RecordingAnswer),
    Operation("get", "/server_info", "What is served, and its limits.", ServerInfo),
    Operation("get", "/model_info", "The served model, as SGLang has it.", ModelInfo),
    Operation("get", "/load", "How many requests there are.", Load),
    Operation("get", "/health", "Whether the process can do its work.", HealthBody),
)


def document(version: str) -> dict[str, Any]:
    """The OpenAPI document."""
    named = (kind for one in OPERATIONS for kind in (one.answer, one.body, one.event, one.error))
    kinds = list(dict.fromkeys(kind for kind in named if kind is not None))
    # A field that is sent only sometimes is one that need not be there: msgspec's schema says so by itself.
    references, components = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    by_kind = dict(zip(kinds, references, strict=True))
    paths: dict[str, Any] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method] = _operation(one, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": "callboard", "version": version},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _operation(one: Operation, by_kind: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    answers: dict[str, Any] = {} if one.answer is None else {JSON: {"schema": by_kind[one.answer]}}
    if one.answer is bytes:
        answers = {BINARY: {"schema": {"type": "string", "format": "binary"}}}
    if one.event is not None:
        content = {"anyOf": [by_kind[one.event], by_kind[one.error]]}
        told = {"type": "string", "contentMediaType": JSON, "contentSchema": content}
        data = told if one.event in NAMED_EVENTS else {"anyOf": [{"const": "[DONE]"}, told]}
        event = {"type": "object", "properties": {"data": data, "event": {"type": "string"}}, "required": ["data"]}
        answers[STREAM] = {"schema": event}
    failed = {JSON: {"schema": by_kind[one.error]}}
    operation: dict[str, Any] = {
        "summary": one.summary,
        "responses": {
            "200": {"description": "Done.", "content": answers},
            **{status: {"description": why, "content": failed} for status, why in ERRORS.items()},
        },
    }
    if one.body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": by_kind[one.body]}}}
    if one.form is not None:
        operation["requestBody"] = {"required": True, "content": {MULTIPART: {"schema": one.form}}}
    if "{id}" in one.path:
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def openapi_handler(version: str) -> Handler:
    """Returns the handler of GET /openapi.json."""
    body = msgspec.json.encode(document(version))

    @access("client")
    async def handle(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=JSON)

    return handle
