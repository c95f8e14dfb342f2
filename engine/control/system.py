"""The system: every actor and every link of one engine.

Owns: which actor is connected to which.
Does not know: what messages mean, HTTP.  Importing it does not import torch; starting it does.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from engine.actors.actor import Actor, Link
from engine.actors.feature import EngineContext, NewScheduler
from engine.actors.ingress import Ingress, Part
from engine.actors.runner import Runner
from engine.actors.scheduler import Scheduler
from engine.actors.step_splitting import StepSplitter
from engine.actors.supervisor import Supervisor
from engine.actors.tokenizer import Tokenizer
from engine.checkpoints.checkpoint import ModelSpec
from engine.config import Config, build_config, without_cluster_key
from engine.control.engine_spec import EngineSpec, engine_spec
from engine.control.features import engine_features
from engine.control.monitor import Monitor
from engine.host.device_defaults import runs_on_cpu
from engine.host.stages import Stages
from engine.host.waiting import wait_briefly
from engine.plugins.blueprint import BlueprintPlanners
from engine.plugins.features import planner_watchers
from engine.plugins.observers import Observers
from engine.plugins.structured import plugin_forms
from engine.scheduling.rows import PlannerLimits
from engine.text.codec import TextCodec
from engine.text.forms import OutputForms
from engine.types.errors import EngineDied
from engine.workers.executors import ExecutorPlacement, Executors, GenerationSettings
from engine.workers.frontend import FrontendCommand, RemoteIngress
from engine.workers.inline import InlineExecutors
from engine.workers.limits import RestartIntensity
from engine.workers.tokenizers import TokenizerPool

if TYPE_CHECKING:
    from engine.workers.placement import Machines

log = logging.getLogger(__name__)

M = TypeVar("M")
RESTART_WINDOW_S = 300.0  # in which restarts are counted
READ_AT_ONCE = 256  # messages; at least as many as a link delivers before other actors get their turn


class System:
    """One engine.  ``start``, use ``ingress``, ``stop``; ``died`` is set if an actor crashed.

    engine: the description in force.  features: by their folders' names."""

    def __init__(
        self,
        config: Config,
        *,
        progress: bool = False,
        machines: "Machines | None" = None,
        frontend: FrontendCommand | None = None,
        imported: Callable[[], None] = lambda: None,
    ) -> None:
        """Check everything that can be checked without loading weights, and build the actors.  Raises CallboardError.

        machines: those that run the ranks; None if all ranks are on this one.
        frontend: how to start the process that takes requests; None for an ingress in this process.
        imported: called on another thread when torch is imported, before a model is loaded in this process."""
        wait_briefly()
        self._machines, self._front, self._progress, self._imported = machines, frontend, progress, imported
        self.stages = Stages().of_process()
        self.engine = engine = engine_spec(config, self.stages, several_machines=machines is not None)
        config, placement = engine.config, engine.config.placement
        self.watchers: dict[str, object] = planner_watchers(time.monotonic)
        self._observers = Observers(
            engine.plugins, config.plugins.options, page_size=config.kv.page_size, model=engine.model_name
        )
        self._forms = self._new_forms()
        self.features = engine_features(
            EngineContext(
                config=config,
                model_name=engine.model_name,
                blueprint=engine.blueprint,
                plugins=engine.plugins,
                observers=self._observers,
                clock=time.monotonic,
            )
        )
        # The actors, in the order of the flow; then the circle of links is closed.
        self.capacity = self._capacity()
        self.tokenizer = self._new_tokenizer()
        self.entrance = self._new_entrance()
        self.executors = Executors(
            num_ranks=config.device.tensor_parallel,
            placement=self.placement(engine),
            intensity=RestartIntensity(placement.max_restarts, RESTART_WINDOW_S),
            step_timeout_s=placement.step_timeout_s,
        )
        self.scheduler = self._new_scheduler()
        scheduler = self._tapped(self.scheduler.inbox)
        self.executors.connect(scheduler)
        self.tokenizer.connect(scheduler=scheduler, ingress=self.entrance.inbox)
        # Stopped in this order: upstream first, so that no message is lost.
        self.actors: list[Actor[Any]] = [self.tokenizer, self.scheduler, self.executors, self.entrance]
        self._supervisor = Supervisor(self.actors, self.entrance)
        self.monitor = self._new_monitor()
        if isinstance(self.entrance, RemoteIngress):
            monitor = self.monitor
            self.entrance.connect(look=monitor.snapshot, watch=monitor.watch, profile=monitor.profile)

    def follow(self, engine: EngineSpec) -> None:
        """Describe another engine from now on, as which the actors work when they have got its settings."""
        self.engine = engine

    # ---- the parts ------------------------------------------------------------------------------

    def _capacity(self) -> int:
        """Return the capacity of mailboxes.

        Per open request at most: its Tokenize and Abort, or its Admit and Abort, plus steps and their results.
        Messages of other processes come as fast as they are read, some of each before the next actor's turn."""
        num_outside = self.config.placement.tokenizers + (self._front is not None)
        return 4 * self.config.limits.max_requests + 64 + READ_AT_ONCE * num_outside

    def _new_forms(self) -> OutputForms:
        model = self.engine.model
        return plugin_forms(
            self.engine.plugins,
            lambda: self.codec,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        )

    def _new_scheduler(self) -> Scheduler:
        clock: Callable[[], float] = time.monotonic
        new_scheduler: NewScheduler = Scheduler
        for feature in self.features.values():
            clock, new_scheduler = feature.clock(clock), feature.scheduler(new_scheduler)
        planners = BlueprintPlanners(
            self.engine.blueprint,
            self.engine.plugins,
            clock,
            load=lambda blueprint: self.engine.plugins,  # loaded when the configuration was checked
            watchers=self.watchers.values(),
            began=self._planner_begins,
            record_events=self._observers.wants_kv_events,
        )
        first, *others = self.executors.links
        return new_scheduler(
            capacity=self.capacity,
            source=planners,
            executors=[self._tapped(first), *others],
            explain=self.executors.explain,
            tokenizer=self._tapped(self.tokenizer.inbox),
            ingress=self.entrance.inbox,
            observers=self._observers,
        )

    def _planner_begins(self, limits: PlannerLimits) -> None:
        for feature in self.features.values():
            feature.plans(limits, self.config)

    def _new_monitor(self) -> Monitor:
        return Monitor(
            ingress=self.entrance,
            tokenizer=self.tokenizer,
            scheduler=self.scheduler,
            executors=self.executors,
            observers=self._observers,
            limits=self.engine.blueprint.limits,
            watchers=self.watchers,
            decode=self.codec.decode,
            clock=time.monotonic,
        )

    def _tapped(self, link: Link[M]) -> Link[M]:
        """Return a link of the scheduler, with the taps of features."""
        for feature in self.features.values():
            link = feature.tap(link)
        return link

    def _new_entrance(self) -> Ingress | RemoteIngress:
        config, placement = self.config, self.config.placement
        parts: tuple[Part, ...] = ("executors", "tokenizers") if placement.tokenizers else ("executors",)
        if self._front is None:
            return Ingress(
                capacity=self.capacity,
                limits=config.limits,
                max_model_len=self.max_len,
                vocab_size=self.engine.model.vocab_size,
                rng=random.Random(config.device.seed or None),
                tokenizer=self.tokenizer.inbox,
                parts=parts,
                use=self.engine.model.use,
                loading=lambda: self.stages.now,
            )
        from engine.workers.placement import process_frontend  # ZeroMQ is needed from here on

        start = process_frontend(
            config=self._child_config(),
            command=self._front,
            max_len=self.max_len,
            vocab_size=self.engine.model.vocab_size,
            capacity=self.capacity,
        )
        return RemoteIngress(
            capacity=self.capacity,
            tokenizer=self.tokenizer.inbox,
            start=start,
            intensity=RestartIntensity(placement.max_restarts, RESTART_WINDOW_S),
            silence_timeout_s=placement.silence_timeout_s,
            parts=parts,
        )

    def _child_config(self) -> Config:
        """Return the configuration that this machine's other processes get: an absolute path and no secret."""
        config = without_cluster_key(self.config)
        model = msgspec.structs.replace(config.model, path=str(self.engine.directory))
        config = msgspec.structs.replace(config, model=model)
        if self._machines is not None:  # placement.link is for ranks on other machines then
            config = build_config(config, {"placement": {"link": "unix"}})
        return config

    def _new_tokenizer(self) -> Tokenizer | TokenizerPool:
        placement = self.config.placement
        if not placement.tokenizers:
            return Tokenizer(
                capacity=self.capacity,
                codec=self.codec,
                vocab_size=self.engine.model.vocab_size,
                forms=self._forms,
            )
        from engine.workers.placement import process_tokenizers  # ZeroMQ is needed from here on

        return TokenizerPool(
            capacity=self.capacity,
            num_processes=placement.tokenizers,
            start=process_tokenizers(config=self._child_config(), capacity=self.capacity),
            intensity=RestartIntensity(placement.max_restarts, RESTART_WINDOW_S),
            silence_timeout_s=placement.silence_timeout_s,
        )

    def placement(self, engine: EngineSpec) -> ExecutorPlacement:
        """Return where the executors of an engine run."""
        num_ranks = engine.config.device.tensor_parallel
        if engine.config.placement.executor == "process":
            from engine.workers.placement import ProcessExecutors  # ZeroMQ is needed from here on

            return ProcessExecutors(
                config=engine.config,
                max_len=engine.row_len,
                num_ranks=num_ranks,
                capacity=self.capacity,
                progress=self._progress,
                machines=self._machines,
                given=dict(engine.facts),
            )
        return InlineExecutors(num_ranks=num_ranks, capacity=self.capacity, load=partial(self._load_runner, engine))

    def _load_runner(self, engine: EngineSpec, rank: int, settings: GenerationSettings, rendezvous: str = "") -> Runner:
        self.stages.begin("torch")
        from engine.kernels.library import compiling

        model, rounded = engine.model, engine.config.model.quantization
        stored = model.stored_formats or (model.dtype if rounded == "none" else rounded,)
        on_cpu = runs_on_cpu(engine.config.device.kind)
        with compiling(stored, recurrent=bool(model.state_bytes), for_cpu=on_cpu):
            from engine.startup.loading import load_runner  # torch is needed from here on

            self.stages.begin("kernels")
        imported, self._imported = self._imported, lambda: None  # once: a later load imports nothing
        imported()
        runner = load_runner(
            engine.config,
            engine.model,
            engine.row_len,
            engine.plugins,
            rank=rank,
            rendezvous=rendezvous,
            progress=self._progress and not rank,
            num_pages=settings.num_pages,
            grammars=self._forms.grammars,
            given=dict(engine.facts),
            stages=self.stages if not rank else None,
        )
        alone = engine.config.device.tensor_parallel == 1
        return StepSplitter(runner, alone=alone, most_tokens=settings.most_tokens)

    # ---- what others read -----------------------------------------------------------------------

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self.engine.config

    @property
    def spec(self) -> ModelSpec:
        """The content of the checkpoint."""
        return self.engine.model

    @property
    def codec(self) -> TextCodec:
        """The text of the model."""
        return self.engine.codec

    @property
    def max_len(self) -> int:
        """The most tokens of prompt and output."""
        return self.engine.max_len

    @property
    def model_name(self) -> str:
        """The model's name for clients."""
        return self.engine.model_name

    @property
    def ingress(self) -> Ingress:
        """The actor that takes requests; an engine whose frontend is a process of its own has none."""
        assert isinstance(self.entrance, Ingress), "requests enter by the frontend's process"
        return self.entrance

    @property
    def has_several_machines(self) -> bool:
        """Whether its ranks are on several machines."""
        return self._machines is not None

    # ---- its life -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Run the actors and wait until the model is loaded.  Raises the errors of loading."""
        await self._supervisor.start()
        what = "start: %.2f s, %.2f s of processor time, of them %s"
        log.info(what, self.stages.total_s, time.process_time(), self.stages)

    async def wait(self) -> None:
        """Wait until the engine has ended.  Raises EngineDied if an actor crashed."""
        await self._supervisor.wait()

    async def stop(self, drain_timeout_s: float = 0.0) -> None:
        """Refuse new requests, let open ones finish for a while, cancel the rest, then end the actors in order."""
        await self._supervisor.stop(drain_timeout_s)
        for feature in self.features.values():
            try:
                closing = asyncio.get_running_loop().run_in_executor(None, feature.close)
            except RuntimeError:  # the program ends without having closed the engine, and starts no thread any more
                feature.close()
            else:
                await closing

    @property
    def died(self) -> EngineDied | None:
        """The error that ended the engine, if an actor crashed; otherwise None."""
        return self._supervisor.died
