"""``callboard replay``: a recording on a terminal.

Owns: what is shown of a replay, its exit codes.  Does not know: how a scheduler is replayed.
"""

import argparse
import sys
import time
from collections import deque
from pathlib import Path

import msgspec
from rich.console import Console

from engine.actors.inboxes import SchedulerInbox
from engine.config import Config
from engine.features.recording.file import Recording, read_recording, write_recording
from engine.features.recording.reasons import sentence_of
from engine.features.recording.replay import Played, Replay
from engine.features.recording.shrinking import shrunk
from engine.features.recording.turns import planning_code
from engine.messages import Abort, Admit, FeatureAnswer, StepDone
from engine.types.errors import ConfigError
from engine.types.notices import ExecutorsLost, ExecutorsReady

FAILED_EXIT_CODE = 1
TORN_EXIT_CODE = 5


def replay(parsed: argparse.Namespace, config: Config) -> None:
    """Run the command, and exit with its code.  This machine's configuration has no part in it."""
    sys.exit(_replayed(parsed))


def _replayed(parsed: argparse.Namespace) -> int:
    try:
        recording = read_recording(parsed.file)
    except OSError as error:
        raise ConfigError(f"{parsed.file}: {error.strerror or error}") from None
    console = Console(highlight=False, markup=False, soft_wrap=True)
    _show_header(console, parsed.file, recording)
    if parsed.shrink is not None:
        return _shrink(console, recording, parsed.shrink, parsed.limit)
    return _replay(console, recording, parsed)


def _replay(console: Console, recording: Recording, parsed: argparse.Namespace) -> int:
    run = Replay(recording, parsed.check_every, tells=not parsed.quiet)
    last: deque[Played] = deque(maxlen=parsed.last)
    difference = ""
    for played in run:
        if played.differs is not None and not difference and not played.turn.failure:
            difference = f"turn {played.number}: plan {played.differs} of this turn is not the recorded one"
        if parsed.quiet:
            continue
        if parsed.last is None:
            _show(console, played)
        else:
            last.append(played)
    for played in last:
        _show(console, played)
    recorded = recording.turns[-1].failure if recording.turns else ""
    console.print(f"{run.num_turns} turns, {run.num_plans} plans, SHA-256 {run.digest}")
    if difference:
        console.print(f"DIFFERS: {difference}; recorded SHA-256 {run.recorded_digest}", style="red")
    if run.fault:
        again = " (as recorded)" if run.fault == recorded else ""
        console.print(f"FAILED in turn {run.num_turns - 1}{again}: {run.fault}", style="red")
    elif recorded:
        console.print(f"the scheduler died of this, and does not here: {recorded}", style="red")
    if recording.torn:
        console.print(
            f"the file is not whole: {recording.torn}; it goes as far as turn {run.num_turns - 1}", style="yellow"
        )
    if difference or run.fault or recorded:
        return FAILED_EXIT_CODE
    return TORN_EXIT_CODE if recording.torn else 0


def _shrink(console: Console, recording: Recording, path: Path, limit_s: float) -> int:
    began = time.monotonic()
    found = shrunk(recording, limit_s)
    if found is None:
        console.print("nothing fails in this recording, so there is nothing to shrink", style="red")
        return FAILED_EXIT_CODE
    small, fault, num_ops = found
    write_recording(path, small.header, small.state, map(msgspec.msgpack.encode, small.turns))
    left = sum(len(turn.messages) or 1 for turn in small.turns)  # a change of settings is a turn of its own
    console.print(f"{left} of {num_ops} operations are left after {time.monotonic() - began:.0f} s: {fault}")
    console.print(f"callboard replay {path}")
    return 0


def _show_header(console: Console, path: Path, recording: Recording) -> None:
    header = recording.header
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(header.written_at_unix_s))
    where = "from a state in the middle" if recording.state else "from the engine's start"
    console.print(
        f"{path}: {header.why}; written {when} by callboard {header.version}, Python {header.python}, numpy "
        f"{header.numpy}; {len(recording.turns)} turns {where}; prompts {header.prompts}"
    )
    names = ", ".join(sorted(header.blueprint.names.values()))
    limits = header.blueprint.limits
    console.print(
        f"{names}; {limits.max_running} rows, pages of {limits.page_size} tokens, steps of {limits.max_step_tokens}"
    )
    if header.code != planning_code():
        console.print("the code that plans is not the one that was recorded: plans may differ", style="yellow")
    if recording.torn:
        console.print(f"the file is not whole: {recording.torn}; what is there is replayed", style="yellow")


def _show(console: Console, played: Played) -> None:
    came = ", ".join(map(_brief, played.turn.messages))
    console.print(f"turn {played.number}  {played.at:+.6f} s  {came}")
    for reason in played.reasons:
        console.print(f"    {reason}", style="dim")
    for number, plan in enumerate(played.plans):
        console.print(f"    {plan}" + ("   <- not as recorded" if number == played.differs else ""))
    if played.fault:
        console.print(f"    {played.fault}", style="red")


def _brief(message: SchedulerInbox) -> str:
    match message:
        case Admit():
            params, tenant = message.params, message.origin.tenant or message.origin.client
            whose = f" of {tenant}" if tenant else ""
            most = "" if params.max_tokens is None else f", at most {params.max_tokens} more"
            return f"request {message.request_id}{whose}: {len(message.token_ids) // 4} tokens{most}"
        case Abort():
            return f"abort of request {message.request_id}"
        case StepDone():
            rank = f" on rank {message.rank}" if message.rank else ""
            return f"step {message.step_id} done{rank}: {len(message.token_ids) // 4} tokens"
        case FeatureAnswer():
            return sentence_of(message)
        case ExecutorsReady():
            return f"executors ready: {message.num_pages} pages"
        case ExecutorsLost():
            return f"executors lost: {message.reason}"
    return str(message)
