"""A seed becomes a scenario.

Owns: how often each thing happens.  Does not know: how it is made to happen.
Swarm testing (Groce et al. 2012): each seed draws its own sizes and its own rates of each kind of fault, often 0, since
a fault that is always there hides what happens without it.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from server.extensions.chaos.sim.codec import text_of
from server.extensions.chaos.sim.liars import KINDS
from server.extensions.chaos.sim.links import LinkWeather
from server.extensions.chaos.sim.oracle import ADAPTERS, VOCAB, as_prompt, continuation
from server.extensions.chaos.sim.scenario import (
    ACTORS,
    LINKS,
    Break,
    Cancel,
    Crash,
    DrainEngine,
    Hang,
    Jump,
    Lose,
    NaN,
    Op,
    PauseLink,
    Scenario,
    SimSetup,
    Submit,
)

MAX_SALTS = 3
MANY_ROWS = 12
LONG_OUTPUT = 90
WITH_STATES = 1_000_000
"""From this seed on, models have states: the scenario is that of the seed so much less, but for what they rule out."""


def draw(seed: int, order: int = 0) -> Scenario:
    """The scenario of a seed.  order: the same with other delays on the links."""
    if seed < WITH_STATES:
        return _Draw(seed, order).scenario()
    scenario = _Draw(seed - WITH_STATES, order).scenario()
    return replace(scenario, seed=seed, setup=_with_states(scenario.setup, random.Random(f"states {seed}")))


def _with_states(setup: SimSetup, rng: random.Random) -> SimSetup:
    """Return the setup of an engine whose model has states.  Where the device drafts, its head reads the model."""
    usual = setup.max_running + setup.num_pages // rng.choice((2, 8))
    return replace(
        setup,
        store_timeout_s=0.0 if setup.proposer and setup.drafted else setup.store_timeout_s,
        num_snapshots=rng.choice((1, 2, 4, setup.max_running, usual, usual, usual)),
        keeps=rng.choice(
            ((True, True, True, 0),) * 4
            + ((False, True, False, 0), (True, False, False, 0), (False, False, True, 0), (False, False, False, 2))
        ),
        num_on_host=rng.choice((1, 2, 8, 8)) if setup.num_host_pages else 0,
    )


class _Draw:
    """One seed's choices, in the order in which they are made."""

    def __init__(self, seed: int, order: int) -> None:
        self.seed = seed
        self.order = order
        self.rng = rng = random.Random(seed * 2 + 1)
        self.proposing = random.Random(seed * 2)  # its own, so that seeds keep what else they draw
        self.page_size = rng.choice((1, 4, 4, 16, 16, 64))
        self.longest_prompt = rng.choice(
            {1: (24, 60, 90), 4: (30, 80, 120), 16: (64, 150), 64: (130, 260)}[self.page_size]
        )
        self.longest_output = rng.choice((4, 12, 24, 40, 80))
        self.eos_token_ids = tuple(range(rng.choice((1, 3, 12, 30))))
        self.salts = ["", *(f"tenant{number}" for number in range(rng.choice((0, 0, 0, 1, MAX_SALTS))))]
        # Of a generator of their own: a scenario without adapters is what it would be if there were none.
        self.adapter_rng = random.Random(~seed)
        self.adapters = self.adapter_rng.choice((("",), ("",), ADAPTERS[:2], ADAPTERS[:3], ADAPTERS[1:]))
        self.priorities = rng.choice(((0,), (0,), (0, 1), (-1, 0, 5)))
        self.span_s = rng.choice((0.05, 0.3, 1.0, 3.0))
        self.ops: list[Op] = []

    def rate(self, *choices: float) -> float:
        return self.rng.choice(choices)

    def scenario(self) -> Scenario:
        self._draw_stems()
        self._draw_submits()
        self._draw_cancels()
        setup = self._share_out(self._draw_setup())
        self._draw_faults(setup)
        # Stable, so that a cancellation at the very moment of its request stays behind it.
        places = sorted(range(len(self.ops)), key=lambda number: self.ops[number].at)
        number_of = {old: new for new, old in enumerate(places)}
        ops: dict[int, Op] = {}
        for new, old in enumerate(places):
            op = self.ops[old]
            if isinstance(op, Cancel):
                op = Cancel(op.at, number_of[op.request])
            elif isinstance(op, NaN | Break):
                op = type(op)(op.at, number_of[op.request], op.token)
            ops[new] = op
        return Scenario(self.seed, setup, ops)

    # ---- requests ---------------------------------------------------------------------------

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(VOCAB) for _ in range(count))

    def _length(self) -> int:
        """Lengths that are special, and any others."""
        page, rng = self.page_size, self.rng
        special = rng.choice((1, page - 1, page, page + 1, 2 * page, 3 * page, 3 * page + 1, 5 * page, 33, 48))
        return max(1, min(self.longest_prompt, special if rng.random() < 0.6 else rng.randint(1, self.longest_prompt)))

    def _draw_stems(self) -> None:
        self.stems = [self._tokens(self._length()) for _ in range(self.rng.randint(1, 4))]
        self.share = self.rate(0.3, 0.7, 0.9)
        self.again = self.rate(0.0, 0.2, 0.5)
        self.turns = self.rate(0.0, 0.2, 0.5)

    def _prompt(self) -> tuple[int, ...]:
        rng = self.rng
        earlier = [op for op in self.ops if isinstance(op, Submit) and op.prompt]
        if earlier and rng.random() < self.again:
            return rng.choice(earlier[-6:]).prompt
        if earlier and rng.random() < self.turns:
            before = rng.choice(earlier[-6:])
            said = continuation(
                as_prompt(before.prompt), min(before.max_tokens or self.longest_output, 60), before.adapter
            )
            prompt = (*before.prompt, *said, *self._tokens(rng.randint(0, 5)))
            if len(prompt) <= self.longest_prompt * 2:
                return prompt
        if rng.random() < self.share:
            stem = rng.choice(self.stems)
            cut = len(stem) if rng.random() < 0.7 else rng.randint(0, len(stem))
            return (*stem[:cut], *self._tokens(max(rng.randint(0, 8), 1 - cut)))
        return self._tokens(self._length())

    def _draw_submits(self) -> None:
        rng = self.rng
        strange = self.rate(0.0, 0.1, 0.3)
        text = self.rate(0.0, 0.0, 0.5)
        stops = self.rate(0.0, 0.1, 0.4)
        slow = self.rate(0.0, 0.2, 0.6)
        ignore_eos = self.rate(0.0, 0.5, 1.0)
        at = 0.0 if rng.random() < 0.1 else 0.2  # the engine may still be loading at 0
        count = rng.choice((10, 20, 30, 45, 60))
        # Outputs that were short so far make the scheduler admit more than will fit, once they get long.
        lulled = count // 3 if rng.random() < 0.5 else 0
        for index in range(count):
            if rng.random() < 0.6:  # else in a burst with the one before
                at += rng.expovariate(1.0) * self.span_s / 12
            prompt = self._prompt()
            adapter = self.adapter_rng.choice(self.adapters)
            fields: dict[str, Any] = {}
            if rng.random() < text:
                fields["kind"] = rng.choice(("text", "turns"))
            max_tokens: int | None = rng.randint(1, 2 if index < lulled else self.longest_output)
            if rng.random() < strange:
                match rng.randrange(5):
                    case 0:
                        prompt = ()
                    case 1:
                        prompt = self._tokens(1100)
                    case 2:
                        max_tokens = 1100
                    case 3:
                        max_tokens = None
                    case 4:
                        fields["echo"] = True
            if prompt and rng.random() < stops:
                said = continuation(as_prompt(prompt), min(max_tokens or 20, 40), adapter)
                place = rng.randrange(len(said))
                if rng.random() < 0.5:
                    fields["stop_token_ids"] = (said[place], *self._tokens(rng.choice((0, 0, 6))))
                else:
                    fields["stop"] = (text_of(said[max(0, place - rng.randint(0, 3)) : place + 1]), "never said")
                fields["include_stop"] = rng.random() < 0.3
            self.ops.append(
                Submit(
                    at=at,
                    prompt=prompt,
                    max_tokens=max_tokens,
                    ignore_eos=rng.random() < ignore_eos or 0 < lulled <= index,
                    salt=rng.choice(self.salts),
                    adapter=adapter,
                    priority=rng.choice(self.priorities),
                    reader=rng.choice(("slow", "never", "collect")) if rng.random() < slow else "fast",
                    logprobs=rng.random() < 0.1,
                    **fields,
                )
            )
        self.end_at = at

    def _draw_cancels(self) -> None:
        rng, rate = self.rng, self.rate(0.0, 0.1, 0.3, 0.6)
        for number, op in enumerate(list(self.ops)):
            if rng.random() < rate:
                after = rng.choice((0.0, 0.001, 0.003, 0.02, 0.1, 0.3)) * rng.uniform(0.5, 1.5)
                self.ops.append(Cancel(op.at + after, number))

    # ---- the engine -------------------------------------------------------------------------

    def _draw_setup(self) -> SimSetup:
        rng, page = self.rng, self.page_size
        submits = [op for op in self.ops if isinstance(op, Submit)]
        sizes = [
            len(op.prompt) + op.max_tokens for op in submits if op.max_tokens and len(op.prompt) + op.max_tokens < 1000
        ]
        largest = max(sizes, default=page)
        factor = rng.uniform(1.0, rng.choice((1.5, 3.0))) if rng.random() < 0.85 else rng.uniform(4.0, 10.0)
        num_pages = max(1, -(-int((largest - 1) * factor) // page))
        max_running = rng.choice((1, 2, 3, 4, 6, 8, 8, 12))
        max_step_tokens = rng.choice((max_running + 1, 16, 32, 64, 256))
        prefill_chunk = rng.choice((1, 4, 7, 16, 32, 64))
        step_s, usual_s = rng.choice((0.002, 0.01, 0.03)), rng.choice((0.0, 0.0002, 0.002, 0.01))
        late, late_s = rng.choice((0.0, 0.0, 0.05, 0.2)), rng.choice((0.02, 0.1, 0.5))
        # Slow enough to be interesting, fast enough that all requests one after another would take 20 s.
        num_steps = sum(
            (op.max_tokens or self.longest_output) + len(op.prompt) // min(prefill_chunk, 16) + 1 for op in submits
        )
        pace = min(1.0, 20.0 / (num_steps * (step_s + 2 * usual_s + late * late_s)))
        weather = LinkWeather(
            seed=self.seed,
            order=self.order,
            usual_s=usual_s * pace,
            late=late,
            late_s=late_s * pace,
            twice=rng.choice((0.0, 0.5)),
        )
        return SimSetup(
            page_size=page,
            num_pages=num_pages,
            num_host_pages=rng.choice((0, 0, max(1, num_pages // 4), num_pages * 2)),
            store_faults=rng.choice((0.0, 0.1, 0.5)),
            store_read_s=rng.choice((0.0, 0.1, 10.0)) * step_s * pace,
            store_timeout_s=rng.choice((0.0, 0.5, 100.0)) * step_s * pace,
            max_running=max_running,
            num_slots=self.adapter_rng.choice((1, 1, 2, 3)),
            max_step_tokens=max(max_step_tokens, max_running + 1),
            prefill_chunk=prefill_chunk,
            overlap=rng.choice((1, 2, 2, 2, 3)),
            max_len=rng.choice((min(1024, largest + 1), largest, 1024)),
            eviction=rng.choice(("lru", "lfu", "fifo", "slru", "priority", "s3fifo")),
            policy=rng.choice(("fcfs", "priority", "lpm")),
            max_overtaken=rng.choice((1, 3, 64)),
            itl_target_s=rng.choice((0.0, 0.0, 0.02)),
            eos_token_ids=self.eos_token_ids,
            max_requests=rng.choice((4, 12, 64, 64, 64, 64, 64)),
            max_queued_tokens=rng.choice((largest, 10**6, 10**6, 10**6, 10**6, 10**6)),
            request_timeout_s=rng.choice((0.2, 1.0)) if rng.random() < 0.12 else 600.0,
            step_s=step_s * pace,
            load_s=rng.choice((0.0, 0.1)),
            record_events=rng.random() < 0.3,
            proposer=self.proposing.choice(("", *KINDS)) if self.proposing.random() < 0.5 else "",
            num_proposed=self.proposing.choice((1, 2, 4, 8)),
            drafted=self.proposing.random() < 0.4,
            check_every=rng.choice((1, 3, 8)),
            weather=weather,
        )

    def _share_out(self, setup: SimSetup) -> SimSetup:
        """Some engines are shared by tenants, one of which asks for more.  By dice of their own."""
        rng = random.Random(f"tenants {self.seed}")
        if rng.random() >= 0.2:
            return setup
        weights = rng.choice(((10, 1), (3, 1)))
        for number, op in enumerate(self.ops):
            if isinstance(op, Submit):
                self.ops[number] = replace(op, tenant=rng.choices(("greedy", "calm"), weights)[0])
        setup = replace(setup, policy="fair")
        return setup if rng.random() < 0.5 else self._crowded(setup, rng)

    def _crowded(self, setup: SimSetup, rng: random.Random) -> SimSetup:
        """An engine in which many rows decode at once, for long, and each makes a step longer: they take turns."""
        submits = {number: op for number, op in enumerate(self.ops) if isinstance(op, Submit)}
        for number, op in submits.items():
            self.ops[number] = replace(op, at=op.at * 0.2, max_tokens=rng.randint(10, LONG_OUTPUT), ignore_eos=True)
        longest = max(len(op.prompt) for op in submits.values()) + LONG_OUTPUT
        step_s = min(setup.step_s, 20.0 / (len(submits) * longest))
        row_s = step_s * rng.choice((0.5, 0.75))
        return replace(
            setup,
            num_pages=MANY_ROWS * -(-longest // setup.page_size),
            max_running=MANY_ROWS,
            max_step_tokens=max(setup.max_step_tokens, 4 * MANY_ROWS),
            max_len=1024,
            max_requests=64,
            max_queued_tokens=10**6,
            step_s=step_s - row_s,
            row_s=row_s,
            itl_target_s=row_s,
        )

    # ---- faults -----------------------------------------------------------------------------

    def _draw_faults(self, setup: SimSetup) -> None:
        rng = self.rng
        moment: Callable[[], float] = lambda: rng.uniform(0.0, self.end_at + 0.3)  # noqa: E731
        submits = [number for number, op in enumerate(self.ops) if isinstance(op, Submit)]
        if rng.random() < 0.25:
            for _ in range(rng.randint(1, 3)):
                number = rng.choice(submits)
                op = self.ops[number]
                assert isinstance(op, Submit)
                self.ops.append(NaN(0.0, number, rng.randrange(min(op.max_tokens or 8, 40))))
        if rng.random() < 0.2:
            begin = moment()
            for link in rng.sample(LINKS, rng.randint(1, len(LINKS))):  # one after another, back in any order
                self.ops.append(PauseLink(begin + rng.uniform(0, 0.5), link, rng.choice((0.05, 0.5, 3.0))))
        if rng.random() < 0.08:
            self.ops.append(Hang(moment(), rng.choice((0.5, 5.0, 40.0))))
        if rng.random() < 0.06:
            self.ops.append(Jump(moment(), 3600.0))
        if rng.random() < 0.08:
            self.ops.append(Crash(moment(), rng.choice(ACTORS)))
        if rng.random() < 0.12:
            at = moment()
            self.ops.append(DrainEngine(at, rng.choice((0.0, 0.05, 1.0, 30.0))))
            if rng.random() < 0.4:
                self.ops.append(DrainEngine(at + rng.uniform(0.0, 0.5), 0.0))
        if rng.random() < 0.15:
            for _ in range(rng.randint(1, 3)):
                self.ops.append(Lose(moment(), rng.choice((0.001, 0.1, 1.0))))
        if rng.random() < 0.08:
            for number in rng.sample(submits, rng.choice((1, 1, 2))):
                op = self.ops[number]
                assert isinstance(op, Submit)
                self.ops.append(Break(0.0, number, rng.randrange(min(op.max_tokens or 8, 40))))
        for number, op in enumerate(self.ops):
            if isinstance(op, Lose) and rng.random() < 0.5:
                self.ops[number] = replace(op, is_change=True)
