"""Traces of an engine's traffic: a JSON object per line, without any text.

Owns: the lines, how they are read, how prompts become blocks that reveal only what they have in common.
Does not know: how traces are recorded, what is predicted from them.

The first line is a ``TraceHead``; after it come ``TracedRequest``s, in the order of their ends, and ``TracedSteps``.
A file may end in the middle of a line, if its server was killed.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine.features.traffic.sizes import StepSize
from engine.messages import Finish
from engine.scheduling.rows import PlannerLimits
from engine.types.errors import ConfigError

FORMAT = 1
LARGEST_BLOCK = 16  # tokens; predictions are possible for pages of a multiple of this many
DIGEST_BYTES = 6  # of a block; two of a million blocks are confused with a probability of 0.2 %

Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]


class TraceHead(msgspec.Struct, frozen=True, tag_field="line", tag="head"):
    """The first line of a trace.

    block: tokens of each block.  limits: limits of the planner.
    settings: section -> key -> value, of settings that a prediction depends on."""

    format: int
    version: str
    model: str
    began_at_unix_s: float
    block: Annotated[int, Meta(ge=1)]
    limits: PlannerLimits
    settings: dict[str, dict[str, Any]]


class TracedRequest(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="line", tag="request"):
    """A request that has ended.  at: arrival at the scheduler, in seconds of the recording's clock.

    prompt, output: number of tokens; ``resumed`` of the output tokens came with the request.
    max_tokens: None for no limit.
    blocks: ``DIGEST_BYTES`` for each whole block of prompt and output, equal if everything up to its end is equal.
    parts: name of a feature -> the digest of its part of the request.
    whole: why nothing of its prompt was taken from the cache, '' if it could be.
    The other fields were measured, as in ``RequestMetrics``."""

    at: Seconds
    prompt: Annotated[int, Meta(ge=1)]
    output: Count
    finish: Literal["stop", "length", "abort"]
    blocks: bytes
    e2e_s: Seconds
    ttft_s: Seconds | None = None
    tpot_s: Seconds | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    resumed: Count = 0
    priority: int = 0
    tenant: str = ""
    client: str = ""
    parts: dict[str, str] = {}
    whole: str = ""
    cached: Count = 0
    retractions: Count = 0


class TracedStep(msgspec.Struct, frozen=True, array_like=True):
    """A step that has completed.  at: time when the device was free for it.  The other fields are ``StepSize``'s."""

    at: Seconds
    seconds: Seconds
    decodes: Count
    context: Count
    prefills: Count
    prefill_tokens: Count
    pairs: Count
    copies: Count

    @property
    def size(self) -> StepSize:
        """The amount of work in it."""
        return StepSize(self.decodes, self.context, self.prefills, self.prefill_tokens, self.pairs, self.copies)


class TracedSteps(msgspec.Struct, frozen=True, tag_field="line", tag="steps"):
    """Steps, oldest first."""

    steps: list[TracedStep]


Line = TraceHead | TracedRequest | TracedSteps


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace that was read.  requests: by the time of their arrival.  steps: oldest first."""

    head: TraceHead
    requests: list[TracedRequest]
    steps: list[TracedStep]


def chained(tokens: bytes, block: int, key: bytes, namespace: str) -> bytes:
    """Return the blocks of a sequence.  tokens: int32s.  key: random, so that texts cannot be tried against a block.

    namespace: only sequences with the same one may share pages."""
    digests, above = [], namespace.encode()
    width = 4 * block
    for start in range(0, len(tokens) - width + 1, width):
        state = hashlib.blake2b(tokens[start : start + width], digest_size=DIGEST_BYTES, key=key)
        state.update(above)
        above = state.digest()
        digests.append(above)
    return b"".join(digests)


def read_trace(path: Path) -> Trace:
    """Read a trace.  Raises ConfigError, naming the line, if it is no trace of this format or has no request."""
    decoder = msgspec.json.Decoder(Line)
    head: TraceHead | None = None
    requests: list[TracedRequest] = []
    steps: list[TracedStep] = []
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                try:
                    line = decoder.decode(text)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    if head is not None and not text.endswith(b"\n"):
                        break  # cut off while it was written
                    raise _wrong(path, number, f"{error}; a server writes traces with storage.trace_mb") from None
                match line:
                    case TraceHead():
                        if head is not None or line.format != FORMAT:
                            observed = "a second head" if head is not None else f"format {line.format}"
                            raise _wrong(path, number, f"{observed}; expected one head, of format {FORMAT}")
                        head = line
                    case _ if head is None:
                        raise _wrong(path, number, "no head; expected one as the first line of a trace")
                    case TracedRequest():
                        _check_blocks(line, head, f"{path}, line {number}")
                        requests.append(line)
                    case TracedSteps(batch):
                        steps += batch
    except OSError as error:
        raise ConfigError(f"the trace {path} cannot be read: {error.strerror}") from None
    if head is None or not requests or not steps:
        what = "steps" if requests else "request that has ended"
        raise ConfigError(f"the trace {path} has no {what}; record for longer, and let requests end")
    return Trace(head, sorted(requests, key=lambda one: one.at), steps)


def _check_blocks(request: TracedRequest, head: TraceHead, where: str) -> None:
    num_tokens = request.prompt + request.output
    expected = num_tokens // head.block * DIGEST_BYTES
    if len(request.blocks) != expected:
        observed = f"blocks have {len(request.blocks)} bytes"
        raise ConfigError(f"{where}: {observed}; those of {num_tokens} tokens have {expected}")


def _wrong(path: Path, number: int, observed: str) -> ConfigError:
    return ConfigError(f"{path}, line {number}: {observed}")


def finish_name(finish: Finish) -> Literal["stop", "length", "abort"] | None:
    """Return a finish as a trace has it; None for failed requests, which are left out."""
    names: dict[Finish, Literal["stop", "length", "abort"]] = {
        Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORT: "abort",
    }  # fmt: skip
    return names.get(finish)
