"""The plan of a run: the sizes of an engine, the weather on its links, and a list of operations.

Owns: what may happen.  Does not know: how often (``dice.py``), how it is made to happen (``world.py``).
The list is explicit, so that parts of it can be left out.
"""

from dataclasses import dataclass, field, fields

from server.extensions.chaos.sim.links import LinkWeather

LINKS = (
    "ingress>tokenizer",
    "tokenizer>scheduler",
    "tokenizer>ingress",
    "scheduler>executor",
    "scheduler>tokenizer",
    "scheduler>ingress",
    "executor>scheduler",
)
ACTORS = ("tokenizer", "scheduler", "executor0", "ingress")


@dataclass(frozen=True, slots=True)
class SimSetup:
    """One engine.  num_slots: for adapters.  row_s: what each row that decodes adds to ``step_s``.

    store_timeout_s: 0 for no store.  store_read_s: mean time to read a page.  store_faults: share of bad calls.
    proposer: how it lies, see ``tests/scheduling/liars.py``, '' for none.  num_proposed: what it is asked for.
    drafted: it is the device's draft model.
    num_snapshots: slots for states besides those of rows; 0 for a model without states.
    keeps: where snapshots are taken, the fields of ``EndsAndBranches``."""

    page_size: int
    num_pages: int
    num_host_pages: int
    store_faults: float
    store_read_s: float
    store_timeout_s: float
    max_running: int
    num_slots: int
    max_step_tokens: int
    prefill_chunk: int
    overlap: int
    max_len: int
    eviction: str
    policy: str
    max_overtaken: int
    itl_target_s: float
    eos_token_ids: tuple[int, ...]
    max_requests: int
    max_queued_tokens: int
    request_timeout_s: float
    step_s: float
    load_s: float
    record_events: bool
    proposer: str
    num_proposed: int
    drafted: bool
    check_every: int
    weather: LinkWeather
    row_s: float = 0.0
    num_snapshots: int = 0
    num_on_host: int = 0
    keeps: tuple[bool, bool, bool, int] = (True, True, True, 0)

    @property
    def longest(self) -> int:
        """Tokens of prompt and output that a request may have: its last one needs no slot."""
        return min(self.max_len, self.num_pages * self.page_size + 1)


@dataclass(frozen=True, slots=True)
class Submit:
    """A client opens a request.  kind: tokens, text or turns.  reader: fast, slow, never, or collect."""

    at: float
    prompt: tuple[int, ...]
    kind: str = "tokens"
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    salt: str = ""
    tenant: str = ""
    adapter: str = ""
    priority: int = 0
    reader: str = "fast"
    echo: bool = False
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client of operation ``request`` goes away."""

    at: float
    request: int


@dataclass(frozen=True, slots=True)
class NaN:
    """Output token ``token`` of operation ``request`` comes out of the device as NaN."""

    at: float
    request: int
    token: int


@dataclass(frozen=True, slots=True)
class Break:
    """Executors are lost whenever the device samples output token ``token`` of operation ``request``."""

    at: float
    request: int
    token: int


@dataclass(frozen=True, slots=True)
class PauseLink:
    """A link passes nothing on for a while."""

    at: float
    link: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Hang:
    """The executor does not answer for a while."""

    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Lose:
    """Executors are lost, with all that was on the device; loading new ones takes ``seconds``.

    is_change: others take their place, and another planner that of the present one, as when settings change."""

    at: float
    seconds: float
    is_change: bool = False


@dataclass(frozen=True, slots=True)
class Crash:
    """An actor raises."""

    at: float
    actor: str


@dataclass(frozen=True, slots=True)
class Jump:
    """The clock is set forward."""

    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class DrainEngine:
    """Orderly shutdown, with ``seconds`` for those that run."""

    at: float
    seconds: float


Op = Submit | Cancel | NaN | Break | PauseLink | Hang | Lose | Crash | Jump | DrainEngine


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that happens in a run.  ops: each under the number it has in the full list, in order of time."""

    seed: int
    setup: SimSetup
    ops: dict[int, Op] = field(default_factory=dict)

    def only(self, kept: list[int]) -> "Scenario":
        """The same without all other operations."""
        return Scenario(self.seed, self.setup, {number: self.ops[number] for number in kept})


def describe(op: Op) -> str:
    """One line about an operation: the fields that are not as usual."""
    if not isinstance(op, Submit):
        return str(op)
    shown = [f"<{len(op.prompt)} tokens, {hash(op.prompt) & 0xFFFF:04x}>"]
    for one in fields(op):
        value = getattr(op, one.name)
        if one.name not in ("at", "prompt") and value != one.default:
            shown.append(f"{one.name}={value!r}")
    return f"Submit(at={op.at:.4f}, {', '.join(shown)})"
