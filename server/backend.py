"""The engine as the server has it: a few protocols, small enough for a test to fake, and all of them as one struct.

Owns: the calls and attributes that may be used.  Does not know: actors, or the messages between them.
Everything here is called on the event loop that also runs the engine's ingress.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.actors.admission import Admitting
from engine.actors.operations import Operate, SettingsChanged
from engine.actors.snapshot import NO_VIEWS, Snapshot, Views
from engine.actors.supervisor import Entrance
from engine.messages import DEFAULT_OPTIONS, Delta, RequestOptions
from engine.text.codec import TextCodec
from engine.types.notices import Profile, Stats
from engine.types.params import SamplingParams
from engine.types.prompt import Prompt
from server.model_card import ModelCard


class EngineStream(Protocol):
    """The output of one choice.  request_id: the engine's own number for it.  estimated_tokens: of its prompt.

    has_output: whether any has come, for which the engine has begun the request."""

    request_id: int
    estimated_tokens: int
    has_output: bool

    async def next(self) -> Delta:
        """Returns all output since the last call; the last has a finish and the usage.

        Raises RequestError, EngineDied."""

    async def relay(self, sink: Callable[[Delta], bool]) -> bool:
        """Give ``sink`` all output in the moment it is produced, until it says that it can take no more now.

        Returns whether that was all.  Raises as ``next`` does, and what the sink raises."""

    def close(self) -> None:
        """Cancel the request unless it has ended; idempotent."""


class EngineIngress(Entrance, Admitting, Protocol):
    """The entrance of requests to the engine.

    recovering: executors or tokenizers were lost, and requests wait for new ones.
    stats: the scheduler's latest gauges.
    settings_watchers: called when limits, or what is said of the model, have changed.
    """

    recovering: bool
    stats: Stats | None
    settings_watchers: list[Callable[[SettingsChanged], None]]

    def open(self, prompt: Prompt, params: SamplingParams, options: RequestOptions = DEFAULT_OPTIONS) -> EngineStream:
        """Accept a request or raise RequestError; never waits."""

    def abort(self, request_id: int) -> bool:
        """End one request; its stream then ends with ``Finish.ABORT``.  Returns whether it was open."""


class EngineMonitor(Protocol):
    """A view of the engine."""

    async def look(
        self, *, meter: bool = False, board: bool = False, views: Views = NO_VIEWS, patience_s: float = 1.0
    ) -> Snapshot:
        """Returns the engine's gauges.  meter: with what has been counted.  board: with where every request is.
        views: with what features show, by name; see ``GetSnapshot``.

        To be read before the next wait.  Raises RequestError: 503 if the engine has not answered in time."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns tokens as text."""

    def profile(self, ask: Profile) -> None:
        """Have the executors record steps, or stop it; no answer comes."""

    def watch(self, observer: object, name: str) -> None:
        """Call the observer hooks of an object from now on."""


class Operations(Protocol):
    """The operations that operators may ask of the engine."""

    async def operate(self, ask: Operate) -> bytes:
        """Returns what ``Operated`` calls the outcome.  Raises RequestError: 400 for settings that cannot be."""


@dataclass(frozen=True)
class Backend:
    """An engine as the server has it.  card: its model.  codec: its tokenizer; by default, of token ids only.

    operations: None where it goes on as it was started."""

    ingress: EngineIngress
    monitor: EngineMonitor
    card: ModelCard
    codec: TextCodec = field(default_factory=TextCodec.without_tokenizer)
    operations: Operations | None = None
