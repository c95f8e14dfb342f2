"""The engine of a run, put together as ``engine/control/system.py`` does, with links that take time.

Owns: which parts there are and how they are connected.  Does not know: what is done with them.
Ingress, tokenizer, scheduler and supervisor are the engine's own; links, executor and codec are simulated.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.actors.actor import Actor
from engine.actors.ingress import Ingress
from engine.actors.scheduler import Scheduler
from engine.actors.supervisor import Supervisor
from engine.actors.tokenizer import Tokenizer
from engine.scheduling.source import PlannerSource
from engine.settings.sections import LimitsSection
from engine.types.notices import Message
from server.extensions.chaos.sim.codec import SimCodec
from server.extensions.chaos.sim.device import SimDevice, SimExecutor
from server.extensions.chaos.sim.links import SimLink, SimMailbox
from server.extensions.chaos.sim.oracle import VOCAB
from server.extensions.chaos.sim.probe import liar_of
from server.extensions.chaos.sim.scenario import LINKS, Scenario
from server.extensions.chaos.sim.store import SimStore


@dataclass(frozen=True, slots=True)
class Engine:
    """The actors of one run.  links: by name, ``sender>receiver``.  actors: by name, in the order of their end."""

    links: dict[str, SimLink]
    device: SimDevice
    tokenizer: Tokenizer
    ingress: Ingress
    executor: SimExecutor
    scheduler: Scheduler
    actors: dict[str, Actor[Any]]
    supervisor: Supervisor

    @property
    def is_anything_under_way(self) -> bool:
        """Whether some message is on a link, or in a mailbox and not handled."""
        return any(map(len, self.links.values())) or any(len(actor.inbox) for actor in self.actors.values())


def assemble(
    scenario: Scenario,
    *,
    source: PlannerSource,
    observers: Any,
    nan_tokens: dict[int, int],
    breaks: dict[int, int],
    mark: Callable[[str], None],
    op_of: Callable[[int], int],
    watch: Callable[[str, Message], None],
) -> Engine:
    """Build the actors of one run.  nan_tokens, breaks, mark: see ``SimDevice``.  op_of, watch: see ``SimLink``."""
    setup = scenario.setup
    capacity = 4 * setup.max_requests + 64
    inboxes = {name: SimMailbox(name, capacity) for name in ("ingress", "tokenizer", "scheduler", "executor0")}
    links: dict[str, SimLink] = {}
    for number, name in enumerate(LINKS):
        inbox = inboxes[name.partition(">")[2].replace("executor", "executor0")]
        links[name] = SimLink(number, name, inbox, setup.weather, op_of, watch)
        inbox.links.append(links[name])
    device = _device(scenario, nan_tokens, breaks, mark)
    tokenizer = Tokenizer(capacity=capacity, codec=SimCodec(setup.eos_token_ids), vocab_size=VOCAB)
    ingress = _ingress(scenario, capacity, links["ingress>tokenizer"])
    executor = SimExecutor(
        capacity=capacity,
        device=device,
        num_pages=setup.num_pages,
        overlap=setup.overlap,
        step_s=setup.step_s,
        row_s=setup.row_s,
        load_s=setup.load_s,
        read_s=setup.store_read_s,
        seed=scenario.seed,
    )
    scheduler = Scheduler(
        capacity=capacity,
        source=source,
        executors=[links["scheduler>executor"]],
        explain=lambda loss: mark("loss explained"),
        tokenizer=links["scheduler>tokenizer"],
        ingress=links["scheduler>ingress"],
        observers=observers,
    )
    executor.connect(links["executor>scheduler"])
    tokenizer.connect(scheduler=links["tokenizer>scheduler"], ingress=links["tokenizer>ingress"])
    actors: dict[str, Actor[Any]] = {}
    for actor in (tokenizer, scheduler, executor, ingress):
        mailbox: Any = inboxes[actor.name]
        actor.inbox = mailbox
        actors[actor.name] = actor
    supervisor = Supervisor(list(actors.values()), ingress)
    return Engine(links, device, tokenizer, ingress, executor, scheduler, actors, supervisor)


def _ingress(scenario: Scenario, capacity: int, tokenizer: SimLink) -> Ingress:
    setup = scenario.setup
    return Ingress(
        capacity=capacity,
        limits=LimitsSection(
            max_requests=setup.max_requests,
            max_queued_tokens=setup.max_queued_tokens,
            request_timeout_s=setup.request_timeout_s,
        ),
        max_model_len=setup.max_len,
        vocab_size=VOCAB,
        rng=random.Random(scenario.seed),
        tokenizer=tokenizer,
    )


def _device(
    scenario: Scenario, nan_tokens: dict[int, int], breaks: dict[int, int], mark: Callable[[str], None]
) -> SimDevice:
    setup = scenario.setup
    return SimDevice(
        num_rows=setup.max_running,
        num_slots=setup.num_slots,
        max_len=setup.max_len,
        page_size=setup.page_size,
        num_pages=setup.num_pages,
        num_host_pages=setup.num_host_pages,
        store=SimStore(scenario.seed, setup.store_faults),
        nan_tokens=nan_tokens,
        breaks=breaks,
        draft=liar_of(setup).draft,
        mark=mark,
        num_snapshots=setup.num_snapshots,
        num_on_host=setup.num_on_host,
    )
