"""The models' step driver with captured prefill: a piecewise runner on a recording device, over the driver's pool."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from engine.graphs.attention import BreakingAttention
from engine.graphs.breakable import GraphRecording, SegmentRecorder
from engine.graphs.capturing import Capturing
from engine.graphs.compiled import CompiledModel
from engine.graphs.device import GraphDevice
from engine.graphs.piecewise import Piecewise
from engine.layers.comm import Comm
from engine.layers.step import StepTensors
from engine.models.decoder import Decoder
from engine.plugins.comm.local import LocalComm
from engine.plugins.testing.steps import Driver
from tests.graphs.recording import RecordingDevice

SIZES = (4, 8, 12, 16)


class KeepingRecorder(SegmentRecorder):
    """A recorder that keeps its recordings, in their order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recordings: list[GraphRecording] = []

    def record(self, size: int, run: Callable[[], Tensor]) -> GraphRecording:
        self.recordings.append(super().record(size, run))
        return self.recordings[-1]


class PiecewiseDriver(Driver):
    """See ``Driver``.  compiler: None for captures of the model itself, else how its pieces are compiled.

    hidden: what is captured of a model that is not compiled; its own if None.
    compiling: what else ``CompiledModel`` is given."""

    def __init__(
        self,
        model: Decoder,
        sizes: Sequence[int] = SIZES,
        compiler: str | None = None,
        device: GraphDevice | None = None,
        comm: Comm | None = None,
        recorder: SegmentRecorder | None = None,
        named: Sequence[str] = (),
        passes: Sequence[Any] = (),
        page_size: int = 4,
        num_pages: int = 100,
        hidden: Callable[[StepTensors], Tensor] | None = None,
        **compiling: Any,
    ) -> None:
        super().__init__(model, page_size, num_pages)
        self.device = device or RecordingDevice()
        self.recorder = recorder or SegmentRecorder(self.device, self.device.pool(), named)
        self.comm = comm or LocalComm()
        if isinstance(self.device, RecordingDevice):
            self.device.register(self.pool.data, *tensors_of(model))
        self.breaking = BreakingAttention(
            self.attention, model.attention_spec, self.recorder, self.device, max(sizes), model.dtype
        )
        self.compiled = None
        if compiler is not None:
            self.compiled = CompiledModel(
                model=model,
                pool=self.pool,
                attention=self.breaking,
                comm=self.comm,
                recorder=self.recorder,
                compiler=compiler,
                **compiling,
                passes=passes,
                named=named,
            )
        self.piecewise = Piecewise(
            model=model,
            hidden=(hidden or model.hidden) if self.compiled is None else self.compiled.hidden,
            pool=self.pool,
            attention=self.breaking,
            device=self.device,
            recorder=self.recorder,
            capturing=Capturing(self.device, self.comm, self.pool.data.device),
            sizes=sizes,
            any_size=self.compiled is not None,
        )
        self.plain = model
        self.model: Any = self.piecewise


def tensors_of(thing: object, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor that an object holds, however deep."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, (list, tuple)):
        for one in thing:
            yield from tensors_of(one, seen)
    elif type(thing).__module__.startswith("engine.") and hasattr(thing, "__dict__"):
        for one in vars(thing).values():
            yield from tensors_of(one, seen)
