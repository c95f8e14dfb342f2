"""The system: builds every actor and every link of one engine.

Owns: which actor is connected to which.
Does not know: what messages mean, HTTP.  Importing it does not import torch; starting it does.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from engine.actors.actor import Actor, Link
from engine.actors.feature import EngineContext, EngineFeature, NewScheduler
from engine.actors.ingress import Ingress, Part
from engine.actors.runner import Runner
from engine.actors.scheduler import Scheduler
from engine.actors.step_splitting import StepSplitter
from engine.actors.supervisor import Supervisor
from engine.actors.tokenizer import Tokenizer
from engine.checkpoints.checkpoint import DEMO, DEMO_NAME, ModelSpec, resolve_checkpoint
from engine.checkpoints.gguf import stored_tensors
from engine.config import Config, build_config, without_cluster_key
from engine.control.features import engine_features
from engine.control.monitor import Monitor
from engine.features.lora.files import AdapterRules, adapter_rules
from engine.host.device_defaults import runs_on_cpu, with_device_defaults
from engine.plugins.deciders import plugin_policy, plugin_proposer, plugin_strategy, policy_choice
from engine.plugins.families import read_model
from engine.plugins.features import FeatureContext, planner_features, planner_watchers
from engine.plugins.kinds import chosen_plugins
from engine.plugins.linears import check_linear_fits, linear_context
from engine.plugins.manager import Plugins
from engine.plugins.observers import Observers
from engine.plugins.parsers import plugin_codec
from engine.plugins.selection import check_named, expected_context
from engine.plugins.structured import plugin_grammars, plugin_processors
from engine.scheduling.planner import Planner
from engine.scheduling.policy import SchedulingPolicy
from engine.scheduling.proposer import DraftModel, Proposer
from engine.scheduling.rows import PlannerLimits
from engine.text.codec import TextCodec, warn_of_unknown_tokens
from engine.text.grammar import Grammars
from engine.types.errors import ConfigError, EngineDied
from engine.workers.executors import ExecutorPlacement, Executors, GenerationSettings
from engine.workers.frontend import FrontendCommand, RemoteIngress
from engine.workers.inline import InlineExecutors
from engine.workers.limits import RestartIntensity
from engine.workers.tokenizers import TokenizerPool

if TYPE_CHECKING:
    from engine.workers.placement import Machines

log = logging.getLogger(__name__)

M = TypeVar("M")
SCORED_LOGITS = 1 << 24  # logits of prompt tokens in a step, 64 MB in float32
MIN_SCORED_CHUNK = 16
RESTART_WINDOW_S = 300.0  # in which restarts are counted
READ_AT_ONCE = 256  # messages; at least as many as a link delivers before other actors get their turn


class System:
    """One engine.  ``start``, use ``ingress``, ``stop``; ``died`` is set if an actor crashed.  codec: for its text."""

    def __init__(
        self,
        config: Config,
        *,
        progress: bool = False,
        machines: "Machines | None" = None,
        frontend: FrontendCommand | None = None,
        before: "System | None" = None,
    ) -> None:
        """Check everything that can be checked without loading weights.  Raises CallboardError.

        machines: those that run the ranks; None if all ranks are on this one.
        frontend: how to start the process that takes requests; None for an ingress in this process.
        before: a running engine for which this configuration is: its actors stay, and this object builds none."""
        config = self.config = with_device_defaults(config, several_machines=machines is not None)
        self._machines = machines
        self._front = frontend
        self._progress = progress
        self._read_checkpoint(before)
        self.codec: TextCodec = plugin_codec(config, self.directory, self.spec.use) if before is None else before.codec
        log.info("%s: %s", self.model_name, self.spec.use)
        warn_of_unknown_tokens(self.codec, self.spec.vocab_size)
        self._plugins = Plugins(chosen_plugins(config), config.plugins.options)
        check_named(self._plugins, expected_context(config, self.spec.shape))
        device = "cpu" if runs_on_cpu(config.device.kind) else ""
        check_linear_fits(self._plugins, linear_context(config, self.spec.dtype, device=device))
        if self._plugins.absent:
            log.warning("requests with a grammar are refused: %s", self._plugins.absent)
        choice = policy_choice(self._plugins, config)
        is_same = before is not None and choice == policy_choice(before._plugins, before.config)
        self.policy: SchedulingPolicy = (
            before.policy if before is not None and is_same else plugin_policy(self._plugins, config)
        )
        proposer = plugin_proposer(self._plugins, config, self.spec, self.max_len, self.codec.vocabulary)
        self._draft = proposer if isinstance(proposer, DraftModel) else None
        self._features = planner_features(FeatureContext(config, proposer, self.spec.vocab_size))
        self.watchers: dict[str, object] = planner_watchers(time.monotonic) if before is None else before.watchers
        self._given = _given_to_ranks(proposer)
        self._observers, self._grammars = self._watched_by(before), self._grammars_of(before)
        own = engine_features(self._context()) if before is None else before.features
        self.features: dict[str, EngineFeature] = own
        if before is None:
            self._build()

    def _read_checkpoint(self, before: "System | None") -> None:
        """Read what the engine must know of its checkpoint, without the weights."""
        config = self.config
        directory = self.directory = resolve_checkpoint(config.model.path, config.model.revision)
        self.spec: ModelSpec = read_model(directory, config.plugins, config.model)
        lora, numerics = config.lora, config.model.numerics
        self.adapter_rules: AdapterRules | None = None
        if lora.folder:
            self.adapter_rules = adapter_rules(self.spec.shape, lora.folder, lora.max_rank, numerics)
        self.num_parameters = 0  # as stored; 0 for dummy weights
        if config.model.load_format == "safetensors":
            # Headers only, and now: a damaged file must not cost the time of importing torch.
            stored = stored_tensors(directory)
            self.num_parameters = sum(math.prod(tensor.shape) for tensor in stored.values())
        self.model_name = config.model.name or (
            DEMO_NAME if config.model.path == DEMO else Path(config.model.path).name
        )
        if before is not None:
            self.model_name = before.model_name  # clients use it
        self.max_len = _max_len(config, self.spec)
        # A request for numbers samples one unused token, so its row needs one extra position.
        self._row_len = self.max_len + (self.spec.use.kind != "generate")

    def _watched_by(self, before: "System | None") -> Observers:
        if before is not None:
            return before._observers
        return Observers(
            self._plugins, self.config.plugins.options, page_size=self.config.kv.page_size, model=self.model_name
        )

    def _context(self) -> EngineContext:
        return EngineContext(
            config=self.config,
            spec=self.spec,
            model_name=self.model_name,
            max_len=self.max_len,
            limits=self.planner_limits(0),
            plugins=self._plugins,
            draft=self._draft,
            observers=self._observers,
            clock=time.monotonic,
        )

    def _grammars_of(self, before: "System | None") -> Grammars | None:
        if before is not None:
            return before._grammars
        return plugin_grammars(
            self._plugins,
            lambda: self.codec,
            vocab_size=self.spec.vocab_size,
            eos_token_ids=self.spec.eos_token_ids,
        )

    def _build(self) -> None:
        """Create the actors in the order of the flow, then close the circle of links."""
        config = self.config
        # Per open request at most: its Tokenize and Abort, or its Admit and Abort, plus steps and their results.
        # Messages of other processes come as fast as they are read, some of each before the next actor's turn.
        num_outside = config.placement.tokenizers + (self._front is not None)
        self.capacity = capacity = 4 * config.limits.max_requests + 64 + READ_AT_ONCE * num_outside
        self.tokenizer = self._tokenizer(capacity)
        self.entrance = self._entrance(capacity)
        placement = config.placement
        self.executors = Executors(
            num_ranks=config.device.tensor_parallel,
            placement=self.placement(capacity),
            intensity=RestartIntensity(placement.max_restarts, RESTART_WINDOW_S),
            step_timeout_s=placement.step_timeout_s,
        )
        new_scheduler: NewScheduler = Scheduler
        for feature in self.features.values():
            new_scheduler = feature.scheduler(new_scheduler)
        self.scheduler = new_scheduler(
            capacity=capacity,
            overlap_depth=config.scheduler.overlap_depth,
            new_planner=self.new_planner,
            executors=[self._tapped(self.executors.links[0]), *self.executors.links[1:]],
            explain=self.executors.explain,
            tokenizer=self._tapped(self.tokenizer.inbox),
            ingress=self.entrance.inbox,
            observers=self._observers,
        )
        scheduler = self._tapped(self.scheduler.inbox)
        self.executors.connect(scheduler)
        self.tokenizer.connect(scheduler=scheduler, ingress=self.entrance.inbox)
        # Stopped in this order: upstream first, so that no message is lost.
        self.actors: list[Actor[Any]] = [self.tokenizer, self.scheduler, self.executors, self.entrance]
        self._supervisor = Supervisor(self.actors, self.entrance)
        self.monitor = Monitor(
            ingress=self.entrance,
            tokenizer=self.tokenizer,
            scheduler=self.scheduler,
            executors=self.executors,
            observers=self._observers,
            limits=self.planner_limits(0),
            watchers=self.watchers,
            decode=self.codec.decode,
            clock=time.monotonic,
        )
        if isinstance(self.entrance, RemoteIngress):
            monitor = self.monitor
            self.entrance.connect(look=monitor.snapshot, watch=monitor.watch, profile=monitor.profile)

    def _tapped(self, link: Link[M]) -> Link[M]:
        """Return a link of the scheduler, with the taps of features."""
        for feature in self.features.values():
            link = feature.tap(link)
        return link

    @property
    def ingress(self) -> Ingress:
        """The actor that takes requests; an engine whose frontend is a process of its own has none."""
        assert isinstance(self.entrance, Ingress), "requests enter by the frontend's process"
        return self.entrance

    @property
    def sampling_defaults(self) -> dict[str, float | int]:
        """The sampling parameters that the checkpoint recommends."""
        given: dict[str, float | int | None] = msgspec.to_builtins(self.spec.sampling)
        return {name: value for name, value in given.items() if value is not None}

    def _entrance(self, capacity: int) -> Ingress | RemoteIngress:
        config, placement = self.config, self.config.placement
        parts: tuple[Part, ...] = ("executors", "tokenizers") if placement.tokenizers else ("executors",)
        if self._front is None:
            return Ingress(
                capacity=capacity,
                limits=config.limits,
                max_model_len=self.max_len,
                vocab_size=self.spec.vocab_size,
                rng=random.Random(config.device.seed or None),
                tokenizer=self.tokenizer.inbox,
                parts=parts,
                use=self.spec.use,
            )
        from engine.workers.placement import process_frontend  # ZeroMQ is needed from here on

        start = process_frontend(
            config=self._child_config(),
            command=self._front,
            max_len=self.max_len,
            vocab_size=self.spec.vocab_size,
            capacity=capacity,
        )
        return RemoteIngress(
            capacity=capacity,
            tokenizer=self.tokenizer.inbox,
            start=start,
            intensity=RestartIntensity(placement.max_restarts, RESTART_WINDOW_S),
            silence_timeout_s=placement.silence_timeout_s,
            parts=parts,
        )

    def _child_config(self) -> Config:
        """Return the configuration that this machine's other processes get: an absolute path and no secret."""
        config = without_cluster_key(self.config)
        model = msgspec.structs.replace(config.model, path=str(self.directory))
        config = msgspec.structs.replace(config, model=model)
        if self._machines is not None:  # placement.link is for ranks on other machines then
            config = build_config(config, {"placement": {"link": "unix"}})
        return config

    def _tokenizer(self, capacity: int) -> Tokenizer | TokenizerPool:
        placement = self.config.placement
        if not placement.tokenizers:
            tokenizer = Tokenizer(
                capacity=capacity, codec=self.codec, vocab_size=self.spec.vocab_size, grammars=self._grammars
            )
            tokenizer.processors = plugin_processors(self._plugins, self.spec.vocab_size)
            return tokenizer
        from engine.workers.placement import process_tokenizers  # ZeroMQ is needed from here on

        return TokenizerPool(
            capacity=capacity,
            num_processes=placement.tokenizers,
            start=process_tokenizers(config=self._child_config(), capacity=capacity),
            intensity=RestartIntensity(placement.max_restarts, RESTART_WINDOW_S),
            silence_timeout_s=placement.silence_timeout_s,
        )

    def placement(self, capacity: int) -> ExecutorPlacement:
        """Return where executors of this configuration run.  capacity: capacity of their mailboxes."""
        num_ranks = self.config.device.tensor_parallel
        if self.config.placement.executor == "process":
            from engine.workers.placement import ProcessExecutors  # ZeroMQ is needed from here on

            return ProcessExecutors(
                config=self.config,
                max_len=self._row_len,
                num_ranks=num_ranks,
                capacity=capacity,
                progress=self._progress,
                machines=self._machines,
                given=self._given,
            )
        return InlineExecutors(num_ranks=num_ranks, capacity=capacity, load=self._load_runner)

    def _load_runner(self, rank: int, settings: GenerationSettings, rendezvous: str = "") -> Runner:
        from engine.startup.loading import load_runner  # torch is needed from here on

        runner = load_runner(
            self.config,
            self.spec,
            self._row_len,
            self._plugins,
            rank=rank,
            rendezvous=rendezvous,
            progress=self._progress and not rank,
            num_pages=settings.num_pages,
            grammars=self._grammars,
            given=self._given,
        )
        return StepSplitter(runner, alone=self.config.device.tensor_parallel == 1, most_tokens=settings.most_tokens)

    def planner_limits(self, num_pages: int) -> PlannerLimits:
        """Return the planner's limits for a pool of so many pages."""
        scheduler, kv = self.config.scheduler, self.config.kv
        return PlannerLimits(
            max_running=scheduler.max_running,
            max_step_tokens=scheduler.max_step_tokens,
            prefill_chunk=scheduler.prefill_chunk,
            page_size=kv.page_size,
            num_pages=num_pages,
            max_len=self._row_len,
            eos_token_ids=self.spec.eos_token_ids,
            num_host_pages=kv.num_host_pages,
            itl_target_s=scheduler.itl_target_ms / 1000,
            record_events=self._observers.wants_kv_events,
            num_ranks=self.config.device.tensor_parallel,
            bigram=self._draft is not None and self._draft.reads_states,
            scored_chunk=max(MIN_SCORED_CHUNK, SCORED_LOGITS // self.spec.vocab_size),
        )

    def new_planner(self, num_pages: int) -> Planner:
        """Return a planner of this configuration, for a pool of so many pages."""
        limits = self.planner_limits(num_pages)
        clock: Callable[[], float] = time.monotonic
        for feature in self.features.values():
            feature.plans(limits, self.config)
            clock = feature.clock(clock)
        strategy = plugin_strategy(self._plugins, self.config, num_pages)
        return Planner(limits, strategy, self.policy, clock, features=self._features, watchers=self.watchers.values())

    @property
    def has_several_machines(self) -> bool:
        """Whether its ranks are on several machines."""
        return self._machines is not None

    def with_config(self, config: Config) -> "System":
        """Return this engine with another configuration, for ``Changeover``: to check it and to ``become`` it.

        It loads models as this one does, even if a subclass defines that.  Raises CallboardError."""
        new = copy(self)
        System.__init__(new, config, machines=self._machines, frontend=self._front, before=self)
        return new

    def become(self, new: "System") -> None:
        """Take over the configuration of another system, and what follows from it."""
        self.config, self.spec, self.directory = new.config, new.spec, new.directory
        self.num_parameters, self._plugins, self._grammars = new.num_parameters, new._plugins, new._grammars
        self.policy, self._draft, self._features = new.policy, new._draft, new._features
        self._given = new._given
        planner = self.scheduler.planner
        for feature in self.features.values():
            if planner is not None:
                feature.plans(self.planner_limits(planner.requests.limits.num_pages), self.config)
            feature.changed(self._context())

    async def start(self) -> None:
        """Run the actors and wait until the model is loaded.  Raises the errors of loading."""
        await self._supervisor.start()

    async def wait(self) -> None:
        """Wait until the engine has ended.  Raises EngineDied if an actor crashed."""
        await self._supervisor.wait()

    async def stop(self, drain_timeout_s: float = 0.0) -> None:
        """Refuse new requests, let open ones finish for a while, cancel the rest, then end the actors in order."""
        await self._supervisor.stop(drain_timeout_s)
        for feature in self.features.values():
            await asyncio.to_thread(feature.close)

    @property
    def died(self) -> EngineDied | None:
        """The error that ended the engine, if an actor crashed; otherwise None."""
        return self._supervisor.died


def _max_len(config: Config, spec: ModelSpec) -> int:
    if config.model.max_model_len > spec.max_len:
        raise ConfigError(
            f"model.max_model_len={config.model.max_model_len}: the model was trained for {spec.max_len} tokens; "
            "lower it or use 0"
        )
    max_len, kv = config.model.max_model_len or spec.max_len, config.kv
    if 0 < kv.num_pages * kv.page_size < max_len:
        log.warning(
            "kv.num_pages=%d: the pool holds %d tokens, and a longer request is refused, though the model takes %d; "
            "raise it to %d, or lower model.max_model_len",
            kv.num_pages,
            kv.num_pages * kv.page_size,
            max_len,
            -(-max_len // kv.page_size),
        )
    return max_len


def _given_to_ranks(proposer: Proposer | DraftModel | None) -> dict[str, bytes]:
    """Return the facts that features on ranks need, see ``RankContext``."""
    if proposer is None:
        return {}
    draft = proposer if isinstance(proposer, DraftModel) else None
    return {"speculation": msgspec.msgpack.encode({"draft": draft, "num_proposed": proposer.num_tokens})}
