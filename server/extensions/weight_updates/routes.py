"""POST /update_weights, /pause and /resume, GET /weight_version and /is_paused, also under SGLang's names.

Owns: their bodies and answers.  Does not know: what weights are, when they change.
"""

from typing import Annotated, Final

import msgspec
from aiohttp import web
from msgspec import Meta

from engine.actors.operations import Operate
from engine.features.weight_updates.engine import (
    Asked,
    Describe,
    PauseRows,
    ResumeRows,
    UpdateWeights,
    WeightsState,
)
from engine.features.weight_updates.messages import NAME, Mode
from engine.settings.sections import ServerSection
from engine.types.errors import FieldError, RequestError
from server.backend import Operations
from server.http.body import BodyReader
from server.http.exchange import refuse_foreign_page
from server.http.operation import operation
from server.http.replies import json_reply
from server.openai.requests import Short

# Also by the words of vLLM (wait) and SGLang (in_place).
MODES: Final[dict[str, Mode]] = {
    "abort": "abort", "finish": "finish", "wait": "finish", "keep": "keep", "in_place": "keep", "retract": "retract",
}  # fmt: skip


class UpdateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The weights to change to.

    path: directory of a checkpoint, in ``weights/`` of storage.folder, or model.path.  version: its name in answers.
    digest: the fingerprint that it must have.  mode: what happens to running requests.
    max_versions: requests end that would have tokens of more versions; 0 for no limit."""

    path: Short
    version: Short = ""
    digest: Short = ""
    mode: Short | None = None
    max_versions: Annotated[int, Meta(ge=0, le=1 << 31)] = 0


class DiskBody(msgspec.Struct, frozen=True, kw_only=True):
    """The same in SGLang's words.  abort_all_requests: end requests that run."""

    model_path: Short
    weight_version: Short | None = None
    abort_all_requests: bool = False


class PauseBody(msgspec.Struct, frozen=True, kw_only=True):
    """The way to pause.  mode: what happens to running requests."""

    mode: Short = "abort"


class DiskAnswer(msgspec.Struct, frozen=True):
    """SGLang's answer."""

    message: str
    success: bool = True
    num_paused_requests: int = 0


class WeightsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The weights that compute now.

    weight_version: as answers name it.  number: of changes since the start.  digest: empty for the first weights.
    took_s: seconds that the operation took."""

    weight_version: str
    number: int
    digest: str
    is_paused: bool
    took_s: float


async def refuse_weights(request: web.Request) -> web.StreamResponse:
    """Refuse where several engines are behind one address.  Raises RequestError: 404."""
    reason = "weights change in one engine, and this server has several; send this to each of them"
    raise RequestError(reason, status=404, code="weights_off")


class WeightRoutes:
    """Handles these routes."""

    def __init__(self, operations: Operations | None, server: ServerSection) -> None:
        self._engine = operations
        self._updates = BodyReader(UpdateBody, _update, server)
        self._from_disk = BodyReader(DiskBody, _update_from_disk, server)
        self._pauses = BodyReader(PauseBody, lambda body: _mode(body.mode), server)

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
        """Answer when every rank has the weights of another checkpoint.  Raises RequestError: 400 to 415."""
        return json_reply(await self._do(await self._updates.read(request)))

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
        state = await self._do(await self._from_disk.read(request))
        return json_reply(DiskAnswer(f"the weights are version {state.weight_version}"))

    @operation(
        "POST",
        "/update_weights_from_tensor",
        "operator",
        also=("/update_weights_from_distributed", "/update_weights_from_ipc", "/init_weights_update_group"),
        off=refuse_weights,
    )
    async def refuse(self, request: web.Request) -> web.Response:
        """Refuse SGLang's other ways.  Raises RequestError: 400."""
        raise RequestError(
            "not served: these bodies are pickled, or name a group of NCCL; save the tensors as safetensors in a "
            "checkpoint's directory, and send its path to /update_weights",
            code="unsupported_parameter",
        )

    @operation("POST", "/pause", "operator", "Hold requests.", answer=WeightsAnswer, off=refuse_weights)
    async def pause(self, request: web.Request) -> web.Response:
        """Answer when running requests stand still.  The request's body is not read.  Raises RequestError."""
        refuse_foreign_page(request)
        return json_reply(await self._do(PauseRows(mode=_mode(request.query.get("mode", "abort")))))

    @operation(
        "POST", "/pause_generation", "operator", "The same in SGLang's words.", answer=WeightsAnswer, off=refuse_weights
    )
    async def pause_generation(self, request: web.Request) -> web.Response:
        """Answer when running requests stand still.  Raises RequestError: 400 to 415."""
        refuse_foreign_page(request)
        mode = await self._pauses.read(request) if request.can_read_body else "abort"
        return json_reply(await self._do(PauseRows(mode=mode)))

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
        return json_reply(await self._do(ResumeRows()))

    @operation(
        "GET",
        "/weight_version",
        "operator",
        "The version of the weights.",
        also=("/get_weight_version", "/is_paused"),
        answer=WeightsAnswer,
        off=refuse_weights,
    )
    async def get(self, request: web.Request) -> web.Response:
        """Return the present weights.  Raises RequestError."""
        return json_reply(await self._do(Describe()))

    async def _do(self, asked: Asked) -> WeightsAnswer:
        if self._engine is None:
            raise RequestError("the weights of one of several engines do not change", status=404, code="weights_off")
        ask = Operate(what="feature", feature=NAME, text=msgspec.json.encode(asked).decode())
        state = msgspec.json.decode(await self._engine.operate(ask), type=WeightsState)
        return WeightsAnswer(
            weight_version=state.version,
            number=state.number,
            digest=state.digest,
            is_paused=state.paused,
            took_s=round(state.took_s, 6),
        )


def _update(body: UpdateBody) -> UpdateWeights:
    mode = None if body.mode is None else _mode(body.mode)
    return UpdateWeights(
        directory=body.path,
        version=body.version,
        digest=body.digest,
        mode=mode,
        max_versions=body.max_versions,
        is_sent=True,
    )


def _update_from_disk(body: DiskBody) -> UpdateWeights:
    mode: Mode | None = "abort" if body.abort_all_requests else None
    return UpdateWeights(directory=body.model_path, version=body.weight_version or "", mode=mode, is_sent=True)


def _mode(given: str) -> Mode:
    """Return the mode of a word.  Raises FieldError."""
    if (mode := MODES.get(given)) is None:
        raise FieldError("mode", f"expected one of {', '.join(MODES)}, not {given!r:.40}")
    return mode
