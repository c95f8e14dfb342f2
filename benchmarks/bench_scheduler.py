"""What does planning a step cost, how many tokens per second could the planner serve, and what do its decisions buy?

Three parts, none of which needs a GPU or torch:

1. Wall time of a steady decode step at 1 to 1,024 running requests: planning it, taking in its tokens, and its messages
   as bytes.  Outputs cross pages at different steps, all prompts share 512 tokens, two steps are in flight.
2. Simulated tokens per second: 256 sequences, 100-1024 tokens in, 100-1024 out, through the planner and through the
   scheduler actor, with an executor that answers at once.
3. Decisions, each on and off over the same requests, in virtual time: a step takes 5 ms + 0.02 ms for each row that
   decodes + 0.05 ms for each prompt token.  The figures are the same on every machine.

    python benchmarks/bench_scheduler.py                    # all of it; half a minute
    python benchmarks/bench_scheduler.py --quick            # a smoke run; its figures mean little
    python benchmarks/bench_scheduler.py --output results.json --plot results.png
"""

import asyncio
import gc
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from machine import keep, new_parser
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from simulation import DEPTH, PAGE_SIZE, Request, Simulation, new_planner, num_sampled, pages_for, poisson, tokens

from engine.actors.scheduler import Scheduler
from engine.kv.events import KVEvent
from engine.messages import Admit, Failed, Step, StepDone, Stop, Tokens
from engine.plugins.manager import Plugins
from engine.plugins.observers import Observers
from engine.scheduling.planner import Planner
from engine.scheduling.requests import OutputForecast
from engine.scheduling.rows import WORTH_WAITING_TOKENS
from engine.types.notices import ExecutorsReady
from engine.types.params import SamplingParams
from engine.workers.wire import Wire

Row = dict[str, Any]


# ---- 1. the cost of a step --------------------------------------------------------------


def decoding(num_running: int, num_steps: int) -> tuple[Planner, Step]:
    """A planner whose requests all decode, one step in flight, and that step."""
    rng = np.random.default_rng(0)
    longest = 512 + 256 + num_steps + 600
    planner = new_planner(
        time.perf_counter,
        max_running=num_running,
        max_step_tokens=16_384,
        prefill_chunk=16_384,
        max_len=longest,
        num_pages=num_running * pages_for(longest),
    )
    stem = tokens(rng, 512)
    for request_id in range(num_running):
        prompt = np.concatenate((stem, tokens(rng, rng.integers(16, 256))))
        params = SamplingParams(max_tokens=num_steps + 500, ignore_eos=True)
        planner.admit(Admit(request_id=request_id, token_ids=prompt.tobytes(), params=params))
    # The first prompt's pages are there for the others once it has run.
    while (step := planner.next_step()) is not None:
        if len(step.decode_rows) == 4 * num_running and step.table_rows:
            break
        planner.complete(StepDone(rank=0, step_id=step.step_id, token_ids=tokens(rng, num_sampled(step)).tobytes()))
        planner.outbox.clear()
    assert step is not None
    return planner, step


def time_steps(num_running: int, num_steps: int) -> np.ndarray:
    """Microseconds of planning and of completion, a line per step."""
    planner, step = decoding(num_running, num_steps)
    sampled = tokens(np.random.default_rng(1), num_running).tobytes()
    answers = [StepDone(rank=0, step_id=step.step_id + number, token_ids=sampled) for number in range(num_steps)]
    times = np.zeros((num_steps, 3))
    for number, answer in enumerate(answers):
        before = time.perf_counter_ns()
        planner.next_step()
        between = time.perf_counter_ns()
        planner.complete(answer)
        times[number] = before, between, time.perf_counter_ns()
        planner.outbox.clear()
    return np.diff(times) / 1000


def statistics(rounds: np.ndarray) -> Row:
    """Of microseconds, a line per round; each the lowest of all rounds: other work on the machine only ever adds."""
    return {
        "us": float(np.median(rounds, axis=1).min()),
        "mean_us": float(rounds.mean(axis=1).min()),
        "p99_us": float(np.percentile(rounds, 99, axis=1).min()),
    }


def step_cost(num_running: int, num_steps: int, rounds: int) -> Iterator[Row]:
    """Planning, completion, and both of a steady step."""
    times = np.array([time_steps(num_running, num_steps) for _ in range(rounds)])
    parts = {"plan": times[:, :, 0], "complete": times[:, :, 1], "both": times.sum(axis=2)}
    for operation, us in parts.items():
        row = {"part": "step", "running": num_running, "operation": operation, "steps": num_steps}
        yield {**row, **statistics(us)}


def message_cost(num_running: int, rounds: int, calls: int = 300) -> Iterator[Row]:
    """A decode step in which some grow into a new page, and its answer."""
    _, step = decoding(num_running, 100)
    done = StepDone(rank=0, step_id=step.step_id, token_ids=tokens(np.random.default_rng(1), num_running).tobytes())
    wire = Wire("benchmark")
    for message in (step, done):
        frame = wire.encode(message)
        for operation, work, argument in (("encode", wire.encode, message), ("decode", wire.decode, frame)):
            times = np.zeros((rounds, calls))
            for place in np.ndindex(times.shape):
                before = time.perf_counter_ns()
                work(argument)
                times[place] = time.perf_counter_ns() - before
            row = {"part": "message", "running": num_running, "operation": f"{operation} {type(message).__name__}"}
            yield {**row, "bytes": len(frame), **statistics(times / 1000)}


# ---- 2. simulated tokens per second -----------------------------------------------------


def offline_job(num_sequences: int) -> tuple[list[Admit], int]:
    """The offline job that engines of this kind are compared by, and how many tokens it puts out."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(num_sequences)]
    params = [SamplingParams(max_tokens=rng.randint(100, 1024), ignore_eos=True) for _ in prompts]
    admits = [
        Admit(request_id=number, token_ids=np.array(prompt, dtype=np.int32).tobytes(), params=one)
        for number, (prompt, one) in enumerate(zip(prompts, params, strict=True))
    ]
    return admits, sum(one.max_tokens or 0 for one in params)


class NullExecutor:
    """Answers a step with tokens that were drawn before."""

    def __init__(self) -> None:
        self._tokens = tokens(np.random.default_rng(0), 1024).tobytes()
        self.num_steps = 0

    def answer(self, step: Step) -> StepDone:
        self.num_steps += 1
        return StepDone(rank=0, step_id=step.step_id, token_ids=self._tokens[: 4 * num_sampled(step)])


def through_planner(planner: Planner, admits: list[Admit], executor: NullExecutor) -> int:
    """All requests to their end; returns the number of tokens."""
    for admit in admits:
        planner.admit(admit)
    answers: deque[StepDone] = deque()
    num_tokens = 0
    while planner.num_open:
        while planner.num_in_flight < DEPTH and (step := planner.next_step()) is not None:
            answers.append(executor.answer(step))
        planner.complete(answers.popleft())
        num_tokens += sum(len(message.finishes) for message in planner.outbox if isinstance(message, Tokens))
        planner.outbox.clear()
    return num_tokens


class Link:
    """Where an actor puts what it has to say."""

    def __init__(self, put: Callable[[Any], None]) -> None:
        self.put = put


class OnePlanner:
    """A source with one planner, which nothing changes."""

    overlap_depth = DEPTH

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def build(self, num_pages: int) -> Planner:
        return self._planner

    def change(self, blueprint: bytes) -> None:
        raise NotImplementedError

    def retune(self, planner: Planner) -> None:
        raise NotImplementedError


async def through_actor(planner: Planner, admits: list[Admit], executor: NullExecutor) -> int:
    """The same through the scheduler actor: mailboxes and the loop come on top."""
    num_tokens = num_ended = 0

    def take(message: Tokens | Failed) -> None:
        nonlocal num_tokens, num_ended
        assert isinstance(message, Tokens)
        num_tokens += len(message.finishes)
        num_ended += len(message.finishes) - message.finishes.count(0)
        if num_ended == len(admits):
            scheduler.inbox.put(Stop())

    scheduler = Scheduler(
        capacity=len(admits) + 16,
        source=OnePlanner(planner),
        executors=[Link(lambda step: scheduler.inbox.put(executor.answer(step)))],
        explain=lambda loss: None,
        tokenizer=Link(take),
        ingress=Link(lambda message: None),
        observers=Observers(Plugins({}), {}, page_size=PAGE_SIZE),
    )
    scheduler.inbox.put(ExecutorsReady(num_pages=1))
    for admit in admits:
        scheduler.inbox.put(admit)
    await scheduler.run()
    return num_tokens


def through_loop(planner: Planner, admits: list[Admit], executor: NullExecutor) -> int:
    return asyncio.run(through_actor(planner, admits, executor))


def count_evictions(planner: Planner) -> list[int]:
    """What the planner evicts from now on; somebody must drain its events."""
    counts: list[int] = []
    tree = planner.pages.tree
    drain = tree.drain_events

    def counting() -> list[KVEvent]:
        counts.extend(len(event.hashes) for event in drain() if event.kind == "removed")
        return []

    tree.drain_events = counting  # type: ignore[method-assign]
    return counts


def throughput(driver: str, num_pages: int, num_sequences: int, rounds: int) -> Iterator[Row]:
    """The fastest of ``rounds``; what was evicted is counted in a run of its own, since counting takes time."""
    admits, expected = offline_job(num_sequences)
    through = through_planner if driver == "planner" else through_loop
    limits = {"max_running": 256, "max_step_tokens": 16_384, "prefill_chunk": 16_384, "num_pages": num_pages}
    seconds = []
    for counted in [False] * rounds + [True]:
        planner, executor = new_planner(time.perf_counter, record_events=counted, **limits), NullExecutor()
        evicted = count_evictions(planner) if counted else []
        before = time.perf_counter()
        num_tokens = through(planner, admits, executor)
        seconds.append(time.perf_counter() - before)
        planner.pages.tree.drain_events()
        assert num_tokens == expected, f"{num_tokens} tokens came out, {expected} were asked for"
    best = min(seconds[:rounds])
    row = {"part": "throughput", "driver": driver, "pages": num_pages, "steps": executor.num_steps, "tokens": expected}
    row |= {"retractions": planner.meter.num_retractions, "evicted_pages": sum(evicted), "seconds": best}
    yield {**row, "tokens_per_s": expected / best, "us_per_step": best / executor.num_steps * 1e6}


# ---- 3. decisions in virtual time -------------------------------------------------------


def itl_target(scale: float) -> Iterator[Row]:
    """Chats of 200 tokens out, with prompts of 500 to 3,000 tokens; the times of steps scatter by 10 %."""
    rng = np.random.default_rng(0)
    requests = [
        Request(at, tokens(rng, rng.integers(500, 3000)), 200, 256) for at in poisson(rng, 8, 120 * scale).tolist()
    ]
    for target_ms in (0, 50, 30, 20):
        simulation = Simulation(requests, jitter=0.1, itl_target_s=target_ms / 1000, num_pages=20_000)
        outcome = simulation.run()
        row = {"part": "decision", "decision": "itl_target_ms", "setting": str(target_ms)}
        row |= {f"itl_p{p}_ms": simulation.itl_ms(p) for p in (50, 90, 99)}
        row |= {f"ttft_p{p}_ms": simulation.ttft_ms(p) for p in (50, 95)}
        yield {**row, "tokens_per_s": outcome.num_tokens / outcome.seconds}


class WorstCase(OutputForecast):
    """Every output is expected to reach its limit."""

    def remaining(self, generated: np.ndarray, most: np.ndarray) -> np.ndarray:
        return most.astype(np.float64)


class NoForecast(OutputForecast):
    """Every output is expected to end at once."""

    def remaining(self, generated: np.ndarray, most: np.ndarray) -> np.ndarray:
        return np.zeros(len(most))


def admission(outputs: str, scale: float) -> Iterator[Row]:
    """A queue that never empties, max_tokens 2,048, and a pool that holds 64 requests at that limit, for 512 rows.

    outputs: log-normal with a mean of 200, or 90 % of 20-80 tokens and 10 % of 1,500-2,048."""
    rng = np.random.default_rng(0)
    count = int(9000 * scale) + 1000
    if outputs == "log-normal":
        lengths = np.clip(rng.lognormal(np.log(200) - 0.5, 1.0, count), 1, 2048).astype(int)
    else:
        lengths = np.where(rng.random(count) < 0.9, rng.integers(20, 80, count), rng.integers(1500, 2048, count))
    requests = [Request(0.0, tokens(rng, rng.integers(32, 256)), length, 2048) for length in lengths.tolist()]
    num_pages = 64 * pages_for(144 + 2048)
    for setting, forecast in (("worst case", WorstCase), ("none", NoForecast), ("learned", OutputForecast)):
        with mock.patch("engine.scheduling.planner.OutputForecast", forecast):
            simulation = Simulation(requests, max_running=512, num_pages=num_pages)
        outcome = simulation.run(until=100 * scale)
        row = {"part": "decision", "decision": f"admission, {outputs}", "setting": setting}
        row |= {
            "tokens_per_s": outcome.num_tokens / outcome.seconds,
            "mean_running": outcome.running_s / outcome.seconds,
        }
        row |= {"pool_use": outcome.used_s / outcome.seconds, "retractions": simulation.planner.meter.num_retractions}
        yield {**row, "itl_p99_ms": simulation.itl_ms(99), "longest_gap_ms": simulation.itl_ms(100)}


def shared_prefix(at_once: int, scale: float) -> Iterator[Row]:
    """Requests arrive together, with the same 2,000 tokens in front of 50 of their own, every 10 seconds."""
    rng = np.random.default_rng(0)
    requests = []
    for at in np.arange(0, 100 * scale, 10).tolist():
        stem = tokens(rng, 2000)
        requests += [Request(at, np.concatenate((stem, tokens(rng, 50))), 50, 64) for _ in range(at_once)]
    needed = len(requests) * 50 + len(requests) // at_once * 2000
    for setting, worth_waiting in (("start at once", 1 << 30), ("wait for it", WORTH_WAITING_TOKENS)):
        with mock.patch("engine.features.shared_prefix.planner.WORTH_WAITING_TOKENS", worth_waiting):
            simulation = Simulation(requests, max_running=256, num_pages=20_000)
            outcome = simulation.run()
        row = {"part": "decision", "decision": f"shared prefix, {at_once} at once", "setting": setting}
        row |= {"computed_to_needed": outcome.num_prefilled / needed}
        yield {**row, **{f"ttft_p{p}_ms": simulation.ttft_ms(p) for p in (50, 95)}}


def policy(scale: float) -> Iterator[Row]:
    """64 shared prefixes of 2,048 tokens, and a pool for a third of them; more requests than fcfs can serve."""
    rng = np.random.default_rng(0)
    stems = [tokens(rng, 2048) for _ in range(64)]
    requests = [
        Request(at, np.concatenate((stems[rng.integers(64)], tokens(rng, rng.integers(32, 128)))), 32, 64)
        for at in poisson(rng, 14, 90 * scale).tolist()
    ]
    for setting in ("priority", "lpm"):
        simulation = Simulation(requests, setting, num_pages=64 * pages_for(2048) // 3)
        outcome = simulation.run()
        num_prompt = sum(len(request.prompt) for request in requests)
        row = {"part": "decision", "decision": "policy", "setting": setting}
        row |= {"hit_rate": float(np.nansum(outcome.cached)) / num_prompt}
        row |= {f"ttft_p{p}_ms": simulation.ttft_ms(p) for p in (50, 95, 100)}
        yield {**row, "tokens_per_s": outcome.num_tokens / outcome.seconds}


# ---- the run ----------------------------------------------------------------------------


def run(quick: bool) -> list[Row]:
    """All parts, with a progress bar."""
    rounds, num_steps, scale = (1, 300, 0.1) if quick else (3, 2000, 1.0)
    num_sequences = 32 if quick else 256
    runnings = (1, 16, 256, 1024)
    parts: list[tuple[Callable[..., Iterator[Row]], tuple[Any, ...]]] = []
    parts += [(step_cost, (count, num_steps if count < 1024 else num_steps // 2, rounds)) for count in runnings]
    parts += [(message_cost, (count, rounds)) for count in runnings]
    # 17,500 pages hold all 256 sequences at their ends.
    for pages in (17_500, 8_750, 4_375):
        num_pages = pages * num_sequences // 256
        parts += [(throughput, (driver, num_pages, num_sequences, 3 * rounds)) for driver in ("planner", "actor")]
    parts += [(decision, (scale,)) for decision in (itl_target, policy)]
    parts += [(shared_prefix, (at_once, scale)) for at_once in (32, 64)]
    parts += [(admission, (outputs, scale)) for outputs in ("log-normal", "mixed")]
    rows: list[Row] = []
    with Progress(transient=True) as progress:
        task = progress.add_task("", total=len(parts))
        for part, arguments in parts:
            progress.update(task, description=part.__name__)
            gc.collect()
            gc.disable()  # A server freezes its heap at start.
            rows += part(*arguments)
            gc.enable()
            progress.advance(task)
    return rows


def number(value: Any) -> str:
    if isinstance(value, str):
        return value
    return (
        f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    )


def show(console: Console, rows: list[Row]) -> None:
    """A table for each part, and one for each decision with the ratio to its first line."""
    costs = [row for row in rows if row["part"] in ("step", "message")]
    runnings = sorted({row["running"] for row in costs})
    table = Table("median / p99, us", *(f"{count:,} running" for count in runnings), "1,024 to 16")
    for operation in dict.fromkeys(row["operation"] for row in costs):
        cells = {row["running"]: row for row in costs if row["operation"] == operation}
        texts = [f"{number(cells[count]['us'])} / {number(cells[count]['p99_us'])}" for count in runnings]
        table.add_row(operation, *texts, f"{cells[1024]['us'] / cells[16]['us']:.1f}x")
    console.print(table)
    table = Table("driver", "pages", "steps", "retractions", "evicted pages", "us per step", "tokens per s")
    for row in rows:
        if row["part"] == "throughput":
            names = ("driver", "pages", "steps", "retractions", "evicted_pages", "us_per_step", "tokens_per_s")
            table.add_row(*(number(row[name]) for name in names))
    console.print(table)
    decisions = [row for row in rows if row["part"] == "decision"]
    for decision in dict.fromkeys(row["decision"] for row in decisions):
        lines = [row for row in decisions if row["decision"] == decision]
        names = [name for name in lines[0] if name not in ("part", "decision", "setting")]
        table = Table("setting", *(name.replace("_", " ") for name in names), title=decision)
        for row in lines:
            table.add_row(row["setting"], *(number(row[name]) for name in names))
        for row in lines[1:]:
            table.add_row(f"{row['setting']} / {lines[0]['setting']}", *(ratio(row, lines[0], name) for name in names))
        console.print(table)


def ratio(row: Row, first: Row, name: str) -> str:
    return f"{row[name] / first[name]:.2f}x" if first[name] else ""


def plot(rows: list[Row], path: Path) -> None:
    """Cost over running requests, and what each decision changes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 7), layout="constrained")
    for operation in ("plan", "complete", "both"):
        lines = [row for row in rows if row["part"] == "step" and row["operation"] == operation]
        running = [row["running"] for row in lines]
        left.plot(running, [row["us"] for row in lines], marker="o", label=f"{operation}, median")
    left.plot(running, [row["p99_us"] for row in lines], marker=".", linestyle=":", label="both, p99")
    left.axhline(150, color="gray", linewidth=0.8, linestyle="--", label="the target at 256")
    left.set(xscale="log", yscale="log", xlabel="running requests", ylabel="microseconds", title="a decode step")
    left.grid(alpha=0.3)
    left.legend()
    decisions = [row for row in rows if row["part"] == "decision"]
    labels = []
    for row in decisions:
        first = next(other for other in decisions if other["decision"] == row["decision"])
        for name in row:
            if row is not first and name not in ("part", "decision", "setting") and row[name] and first[name]:
                less_is_better = name.endswith("_ms") or name in ("retractions", "computed_to_needed")
                better = (row[name] < first[name]) == less_is_better
                right.plot([1, row[name] / first[name]], [len(labels)] * 2, "g-" if better else "r-", linewidth=4)
                labels.append(f"{row['decision']}: {row['setting']} / {first['setting']}: {name.replace('_', ' ')}")
    right.axvline(1, color="black", linewidth=0.8)
    right.set(xscale="log", title="decisions: ratio on the same requests, green is better")
    right.set_yticks(range(len(labels)), labels, fontsize=6)
    right.invert_yaxis()
    right.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="everything small and once; under ten seconds")
    parser.add_argument("--plot", type=Path, help="write a PNG; needs matplotlib")
    arguments = parser.parse_args()
    rows = run(arguments.quick)
    show(Console(), rows)
    keep(arguments.output, {"rows": rows})
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
