"""Weight updates, pauses and memory under SGLang's names, which verl, slime and others send.

Owns: these bodies and answers.  Does not know: what weights are, when they change.
"""

from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from engine.features.weight_updates.engine import PauseRows, RegainMemory, ReleaseMemory, UpdateWeights
from engine.features.weight_updates.messages import TAGS, Mode, Tag
from engine.settings.sections import ServerSection
from engine.types.errors import FieldError, RequestError
from server.clients import Clients
from server.extensions.weight_updates.engine_weights import EngineWeights, WeightsAnswer, mode_of, refuse_weights
from server.extensions.weight_updates.received import bytes_in_memory, decoded
from server.http.body import BodyReader
from server.http.exchange import EXCHANGE, refuse_foreign_page
from server.http.operation import operation
from server.http.replies import json_reply
from server.openai.requests import Short

PICKLED = (
    "not served: this is pickled, or names a group of NCCL; send the tensors as base64 of safetensors, or save them as "
    "safetensors and send their path to /update_weights"
)


class DiskBody(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint, or a file of tensors.  abort_all_requests: end requests that run."""

    model_path: Short
    weight_version: Short | None = None
    abort_all_requests: bool = False


class TensorBody(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors.  serialized_named_tensors: one entry, base64 of a file of safetensors."""

    serialized_named_tensors: Annotated[list[str], Meta(max_length=64)]
    weight_version: Short | None = None
    abort_all_requests: bool = False


class PauseBody(msgspec.Struct, frozen=True, kw_only=True):
    """The way to pause.  mode: what happens to running requests."""

    mode: Short = "abort"


class MemoryBody(msgspec.Struct, frozen=True, kw_only=True):
    """Kinds of memory.  tags: none for all."""

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None


class FlushAnswer(msgspec.Struct, frozen=True):
    """SGLang's answer to a flush."""

    success: bool = True


class DiskAnswer(msgspec.Struct, frozen=True):
    """SGLang's answer."""

    message: str
    success: bool = True
    num_paused_requests: int = 0


class SGLangRoutes:
    """Handles these routes."""

    def __init__(self, weights: EngineWeights, server: ServerSection, clients: Clients) -> None:
        self._weights = weights
        self._clients = clients
        self._from_disk = BodyReader(DiskBody, lambda body: body, server)
        self._tensors = BodyReader(TensorBody, lambda body: body, server)
        self._pauses = BodyReader(PauseBody, lambda body: mode_of(body.mode), server)
        self._memory = BodyReader(MemoryBody, _tags, server)

    @operation("GET", "/flush_cache", "operator", "Forget what is cached; trainers send this as a question.")
    async def flush(self, request: web.Request) -> web.Response:
        """Forget what is cached for the operator's key.  A page of another site cannot know that key."""
        refuse_foreign_page(request)
        self._clients.forget_cache(request[EXCHANGE].key)
        return json_reply(FlushAnswer())

    @operation(
        "POST",
        "/update_weights_from_disk",
        "operator",
        "The same in SGLang's words.",
        answer=DiskAnswer,
        body=DiskBody,
        off=refuse_weights,
    )
    async def update_from_disk(self, request: web.Request) -> web.Response:
        """Answer when every rank has the weights of another checkpoint.  Raises RequestError: 400 to 415."""
        body = await self._from_disk.read(request)
        return await self._update(body, body.model_path)

    @operation(
        "POST",
        "/update_weights_from_tensor",
        "operator",
        "The same with tensors.",
        answer=DiskAnswer,
        body=TensorBody,
        off=refuse_weights,
    )
    async def update_from_tensor(self, request: web.Request) -> web.Response:
        """Answer when every rank has the tensors.  Raises RequestError: 400 to 415."""
        body = await self._tensors.read(request)
        if len(body.serialized_named_tensors) != 1:
            raise FieldError("serialized_named_tensors", "expected one entry, with whole tensors for all ranks")
        content = decoded("serialized_named_tensors", body.serialized_named_tensors[0])
        if content[8:9] != b"{":
            raise FieldError("serialized_named_tensors", PICKLED, code="unsupported_parameter")
        return await self._update(body, memory=bytes_in_memory(content))

    async def _update(
        self, body: DiskBody | TensorBody, directory: str = "", memory: int | None = None
    ) -> web.Response:
        mode: Mode | None = "abort" if body.abort_all_requests else None
        version = body.weight_version or ""
        update = UpdateWeights(directory=directory, version=version, mode=mode, is_sent=memory is None)
        state = await self._weights.do(update, memory)
        return json_reply(DiskAnswer(f"the weights are version {state.weight_version}"))

    @operation(
        "POST",
        "/update_weights_from_distributed",
        "operator",
        also=("/update_weights_from_ipc", "/init_weights_update_group"),
        off=refuse_weights,
    )
    async def refuse(self, request: web.Request) -> web.Response:
        """Refuse SGLang's other ways.  Raises RequestError: 400."""
        raise RequestError(PICKLED, code="unsupported_parameter")

    @operation(
        "POST", "/pause_generation", "operator", "The same in SGLang's words.", answer=WeightsAnswer, off=refuse_weights
    )
    async def pause_generation(self, request: web.Request) -> web.Response:
        """Answer when running requests stand still.  Raises RequestError: 400 to 415."""
        refuse_foreign_page(request)
        mode = await self._pauses.read(request) if request.can_read_body else "abort"
        return json_reply(await self._weights.do(PauseRows(mode=mode)))

    @operation(
        "POST",
        "/release_memory_occupation",
        "operator",
        "Give memory back.",
        answer=WeightsAnswer,
        body=MemoryBody,
        off=refuse_weights,
    )
    async def release(self, request: web.Request) -> web.Response:
        """Answer when the system has the memory; requests wait.  Raises RequestError: 400 to 415."""
        return json_reply(await self._weights.do(ReleaseMemory(tags=await self._memory.read(request))))

    @operation(
        "POST",
        "/resume_memory_occupation",
        "operator",
        "Take it again.",
        answer=WeightsAnswer,
        body=MemoryBody,
        off=refuse_weights,
    )
    async def regain(self, request: web.Request) -> web.Response:
        """Answer when the memory is there; requests go on when none is missing.  Raises RequestError: 400 to 415."""
        return json_reply(await self._weights.do(RegainMemory(tags=await self._memory.read(request))))


def _tags(body: MemoryBody) -> tuple[Tag, ...]:
    return tuple(one for one in TAGS if body.tags is None or one in body.tags)
