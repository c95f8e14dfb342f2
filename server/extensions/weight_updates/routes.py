"""POST /update_weights, /pause and /resume, GET /weight_version and /is_paused, and vLLM's phases of an update.

Owns: their bodies and answers.  Does not know: what weights are, when they change.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from engine.checkpoints.shards import DTYPE_BYTES
from engine.features.weight_updates.engine import (
    BeginUpdate,
    Describe,
    FinishUpdate,
    PauseRows,
    ResumeRows,
    UpdateWeights,
)
from engine.features.weight_updates.memory import SPELLINGS
from engine.features.weight_updates.messages import Announced
from engine.settings.sections import ServerSection
from engine.types.errors import FieldError, RequestError
from server.extensions.weight_updates.engine_weights import EngineWeights, WeightsAnswer, mode_of, refuse_weights
from server.extensions.weight_updates.received import BODY_TYPE, body_in_memory, decoded, tensors_in_memory
from server.http.body import BodyReader, media_type
from server.http.exchange import refuse_foreign_page
from server.http.operation import operation
from server.http.replies import json_reply
from server.openai.requests import Short

Size = Annotated[int, Meta(ge=0, le=1 << 40)]
MAX_TENSORS = 1 << 16


class UpdateInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors in vLLM's words, and where they are.

    names, dtype_names, shapes: of all tensors.  path: a file of them below ``weights/`` of storage.folder.
    data: their bytes in this order, as base64.  Handles of CUDA and a group of NCCL are not served."""

    names: Annotated[list[Short], Meta(max_length=MAX_TENSORS)] = []
    dtype_names: Annotated[list[Short], Meta(max_length=MAX_TENSORS)] = []
    shapes: Annotated[list[Annotated[list[Size], Meta(max_length=64)]], Meta(max_length=MAX_TENSORS)] = []
    path: Short | None = None
    data: str | None = None


class UpdateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The weights to change to.

    path: directory of a checkpoint, or file of tensors, in ``weights/`` of storage.folder, or model.path.
    version: its name in answers.  digest: the fingerprint that it must have; of a file also its SHA-256.
    mode: what happens to running requests.
    max_versions: requests end that would have tokens of more versions; 0 for no limit.
    update_info: tensors in place of ``path``, in vLLM's words."""

    path: Short = ""
    version: Short = ""
    digest: Short = ""
    mode: Short | None = None
    max_versions: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    update_info: UpdateInfo | None = None


class FinishBody(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an update.  weight_version: its name in answers."""

    weight_version: Short | None = None


class InitBody(msgspec.Struct, frozen=True, kw_only=True):
    """A channel for tensors.  init_info: empty, since none is needed here."""

    init_info: dict[str, Any]


class Said(msgspec.Struct, frozen=True):
    """An answer in vLLM's words."""

    message: str


class WorldSize(msgspec.Struct, frozen=True):
    """The number of ranks."""

    world_size: int


class WeightRoutes:
    """Handles these routes."""

    def __init__(self, weights: EngineWeights, server: ServerSection) -> None:
        self._weights = weights
        self._server = server
        self._updates = BodyReader(UpdateBody, lambda body: body, server)
        self._ends = BodyReader(FinishBody, lambda body: body.weight_version or "", server)
        self._inits = BodyReader(InitBody, _check_init, server)

    @operation(
        "POST",
        "/update_weights",
        "operator",
        "Compute with other weights.",
        answer=WeightsAnswer,
        body=UpdateBody,
        off=refuse_weights,
    )
    async def update(self, request: web.Request) -> web.Response:
        """Answer when every rank has other weights.  Raises RequestError: 400 to 415.

        A body of bytes is a file of tensors, and its query has the fields of ``UpdateBody``."""
        if media_type(request) == BODY_TYPE:
            refuse_foreign_page(request)
            update = _update(_queried(request))
            most = (await self._weights.ask(Describe())).most_bytes
            memory = await body_in_memory(request, most, self._server.client_timeout_s)
            return json_reply(await self._weights.do(update, memory))
        body = await self._updates.read(request)
        if (info := body.update_info) is None:
            if not body.path:
                raise FieldError("path", "required, but not given")
            return json_reply(await self._weights.do(_update(body, body.path, is_sent=True)))
        announced = _announced(info)
        if info.data is None:
            update = _update(body, _path(info), is_sent=True, is_piece=True, announced=announced)
            return json_reply(await self._weights.do(update))
        content, widths = decoded("update_info.data", info.data), [_num_bytes(one) for one in announced]
        update = _update(body, is_piece=True)
        memory = tensors_in_memory(announced, widths, content)
        return json_reply(await self._weights.do(update, memory))

    @operation(
        "POST",
        "/start_weight_update",
        "operator",
        "Collect tensors until the update ends.",
        answer=Said,
        off=refuse_weights,
    )
    async def start(self, request: web.Request) -> web.Response:
        """Begin an update in pieces.  The request's body is not read.  Raises RequestError."""
        refuse_foreign_page(request)
        await self._weights.do(BeginUpdate())
        return json_reply(Said("the update has begun"))

    @operation(
        "POST", "/finish_weight_update", "operator", "Change to them.", answer=Said, body=FinishBody, off=refuse_weights
    )
    async def finish(self, request: web.Request) -> web.Response:
        """Answer when every rank has all pieces at once.  Raises RequestError: 400 to 415."""
        state = await self._weights.do(FinishUpdate(version=await self._ends.read(request)))
        return json_reply(Said(f"the weights are version {state.weight_version}"))

    @operation(
        "POST",
        "/init_weight_transfer_engine",
        "operator",
        "Have a channel for tensors.",
        answer=Said,
        body=InitBody,
        off=refuse_weights,
    )
    async def init(self, request: web.Request) -> web.Response:
        """Say that none is needed.  Raises RequestError: 400 for a group of NCCL."""
        await self._inits.read(request)
        return json_reply(Said("no channel is needed: send path or data in update_info"))

    @operation("GET", "/get_world_size", "operator", "The number of ranks.", answer=WorldSize, off=refuse_weights)
    async def world_size(self, request: web.Request) -> web.Response:
        """Return the number of ranks.  Raises RequestError."""
        return json_reply(WorldSize((await self._weights.ask(Describe())).num_ranks))

    @operation("POST", "/pause", "operator", "Hold requests.", answer=WeightsAnswer, off=refuse_weights)
    async def pause(self, request: web.Request) -> web.Response:
        """Answer when running requests stand still.  The request's body is not read.  Raises RequestError."""
        refuse_foreign_page(request)
        mode = mode_of(request.query.get("mode", "abort"))
        return json_reply(await self._weights.do(PauseRows(mode=mode)))

    @operation(
        "POST",
        "/resume",
        "operator",
        "Go on after a pause.",
        also=("/continue_generation",),
        answer=WeightsAnswer,
        off=refuse_weights,
    )
    async def resume(self, request: web.Request) -> web.Response:
        """End a pause.  The request's body is not read.  Raises RequestError."""
        refuse_foreign_page(request)
        return json_reply(await self._weights.do(ResumeRows()))

    @operation(
        "GET",
        "/weight_version",
        "operator",
        "The version of the weights.",
        also=("/get_weight_version", "/weight_info", "/is_paused"),
        answer=WeightsAnswer,
        off=refuse_weights,
    )
    async def get(self, request: web.Request) -> web.Response:
        """Return the present weights.  Raises RequestError."""
        return json_reply(await self._weights.do(Describe()))


def _update(
    body: UpdateBody,
    directory: str = "",
    *,
    is_sent: bool = False,
    is_piece: bool = False,
    announced: Sequence[Announced] = (),
) -> UpdateWeights:
    return UpdateWeights(
        directory=directory,
        version=body.version,
        digest=body.digest,
        mode=None if body.mode is None else mode_of(body.mode),
        max_versions=body.max_versions,
        is_sent=is_sent,
        is_piece=is_piece,
        announced=tuple(announced),
    )


def _queried(request: web.Request) -> UpdateBody:
    """Return the fields that a query has.  Raises RequestError."""
    try:
        body = msgspec.convert(dict(request.query), UpdateBody, strict=False)
    except msgspec.ValidationError as error:
        raise RequestError(f"the query: {error}") from None
    if body.path:
        raise FieldError("path", "the body is the file, so no path is needed")
    return body


def _announced(info: UpdateInfo) -> tuple[Announced, ...]:
    """Return the tensors of vLLM's lists.  Raises FieldError."""
    if not len(info.names) == len(info.dtype_names) == len(info.shapes) == len({*info.names}):
        raise FieldError("update_info", "names, dtype_names and shapes need one entry for each tensor, each name once")
    for dtype in info.dtype_names:
        if dtype not in SPELLINGS:
            raise FieldError("update_info.dtype_names", f"expected one of {', '.join(SPELLINGS)}, not {dtype!r:.40}")
    pairs = zip(info.names, info.dtype_names, info.shapes, strict=True)
    return tuple((name, SPELLINGS[dtype], tuple(shape)) for name, dtype, shape in pairs)


def _num_bytes(announced: Announced) -> int:
    return math.prod(announced[2]) * DTYPE_BYTES[announced[1]]


def _path(info: UpdateInfo) -> str:
    if info.path is None:
        raise FieldError(
            "update_info",
            "its tensors are in no place that is served: give path or data; handles of CUDA are pickled, and no group "
            "of NCCL is joined",
            code="unsupported_parameter",
        )
    return info.path


def _check_init(body: InitBody) -> None:
    if body.init_info:
        raise FieldError(
            "init_info",
            "no group of NCCL is joined; send {}, and tensors by path or data in update_info, by a body or a socket",
            code="unsupported_parameter",
        )
