"""Loading a rank: device, weights, attention, rows, features, KV pool and captures, in that order, become a runner.

Owns: how one rank is put together.  Does not know: actors, steps, which features there are.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from engine.checkpoints.checkpoint import ModelSpec, resolve_checkpoint
from engine.checkpoints.gguf import block_kinds
from engine.config import Config
from engine.execution.attention import RankAttention
from engine.execution.captured_steps import CapturedDecodes
from engine.execution.compiled_decodes import compiled_decodes
from engine.execution.device import choose_device, choose_dtype, fair_share, free_bytes, host_place, set_threads
from engine.execution.features import RankContext, RankFeature
from engine.execution.host_rows import HostRows
from engine.execution.needs import Needs
from engine.execution.rows import DeviceRows
from engine.execution.runner import ModelRunner
from engine.execution.step_threads import StepThreads, TimedSteps
from engine.graphs.passes import build_passes
from engine.graphs.rank import RankGraphs, StepParts
from engine.host.kept_results import KeptResults
from engine.host.stages import Stages
from engine.kernels.cpu import CPUKernels, cpu_kernels
from engine.layers.comm import Comm, ExchangingComm
from engine.layers.ordered_comm import OrderedComm
from engine.layers.packing import Linears, RowKeeper
from engine.layers.states import RecurrentStates
from engine.models.decoder import Decoder
from engine.models.loader import load_model
from engine.models.model import Model, build_model
from engine.plugins.attention.settings import AttentionSettings
from engine.plugins.hookspecs import CommContext
from engine.plugins.kinds import LOGITS_PROCESSOR, named
from engine.plugins.manager import Plugins
from engine.plugins.parsers import plugin_codec
from engine.plugins.selection import NOT_MEASURED
from engine.plugins.structured import plugin_grammars, plugin_processors
from engine.plugins.support.paging import page_stride
from engine.sampling.captured import SamplingVariant
from engine.sampling.constraints import Constraints
from engine.sampling.processing import Processing
from engine.sampling.sampler import Sampler
from engine.startup.features import left_on_failure, rank_features
from engine.startup.invariance import prove_decodes, prove_invariance, require_provable
from engine.startup.linear_race import processor_name
from engine.startup.linears import choose_linears
from engine.startup.memory import check_states, check_weights, report
from engine.startup.model_steps import ModelSteps
from engine.startup.pools import PoolMaker
from engine.startup.race import AttentionRace, measured_attention
from engine.startup.start import Start
from engine.startup.thread_race import ThreadRace, common_choices
from engine.text.codec import TextCodec
from engine.text.grammar import Grammars
from engine.types.errors import ConfigError
from engine.types.params import SamplingParams

log = logging.getLogger(__name__)

RACE_CONTEXT = 256  # tokens of each sequence in the steps that measure threads


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its weights.

    reload: as in ``RankContext``.
    kernels: those of a model on a CPU, if there are any.
    thread_choices: numbers of threads that are worth measuring."""

    model: Model
    reload: Callable[[ModelSpec], Model]
    kernels: CPUKernels | None
    thread_choices: Sequence[int]


def load_runner(
    config: Config,
    spec: ModelSpec,
    max_len: int,
    plugins: Plugins,
    *,
    rank: int,
    local_rank: int | None = None,
    rendezvous: str = "",
    progress: bool,
    num_pages: int = 0,
    grammars: Grammars | None = None,
    given: Mapping[str, bytes] | None = None,
    stages: Stages | None = None,
) -> ModelRunner:
    """Return a runner that is ready for its first step.  Runs on the device thread, of all ranks at the same time.

    local_rank: the rank's GPU of this machine; None for the one of the rank's number.
    rendezvous: where the ranks of this group meet, as in ``CommContext``; empty for one rank.
    num_pages: pages that the runner must have, since the runner before it had them; 0 for kv.num_pages, or what fits.
    grammars: those of this process, if the text side is in it as well.
    given: as in ``RankContext``.
    stages: of the start that this is part of.

    Raises ConfigError, WeightsError, PluginError, GraphError with a message for the user."""
    device = choose_device(config.device, rank if local_rank is None else local_rank)
    _check_device(config, device)
    stages = stages or Stages()
    stages.begin("device")
    start = _start(config, spec, max_len, plugins, device, rank, rendezvous, progress, stages)
    loaded = _load_weights(start)
    stages.begin("attention")
    attention = _choose_attention(start, loaded.model)
    rows, sampler = _new_rows(start, loaded.model), _new_sampler(start, loaded)
    if start.invariant:
        _prove(start, loaded.model, attention, sampler)
    if plugins.several.get(LOGITS_PROCESSOR):
        sampler.processing = Processing(plugin_processors(plugins, spec.vocab_size), rows.tokens_RM)
    stages.begin("KV pool")
    states = _new_states(start)
    context = _context(start, loaded, rows, states, given or {})
    features = rank_features(context)
    context.features.extend(features)
    with left_on_failure(features):
        pools = PoolMaker(start, loaded.model, attention, rows, sampler, states, features)
        parts = pools.parts(num_pages)
        must_agree = start.comm.size > 1
        constraints = Constraints(grammars or _own_grammars(start), spec.vocab_size, device, must_agree=must_agree)
        return _new_runner(start, loaded, parts, constraints, features, pools.needs)


def _start(
    config: Config,
    spec: ModelSpec,
    max_len: int,
    plugins: Plugins,
    device: torch.device,
    rank: int,
    rendezvous: str,
    progress: bool,
    stages: Stages,
) -> Start:
    """Connect the rank to the others, and its device to graphs."""
    dtype = choose_dtype(config.model.dtype, device, spec.dtype)
    comm = _connect(config, plugins, rank, device, rendezvous)
    return Start(
        config=config,
        spec=spec,
        max_len=max_len,
        plugins=plugins,
        comm=comm,
        device=device,
        dtype=dtype,
        graphs=RankGraphs(config.graphs, device, comm, build_passes(plugins, device, dtype)),
        place=host_place() if device.type == "cpu" else comm.rank,
        progress=progress,
        stages=stages,
    )


def _load_weights(start: Start) -> Loaded:
    config, spec, graphs, comm, device = start.config, start.spec, start.graphs, start.comm, start.device
    graphs.device.trim()  # memory that a runner before this one has left
    room = fair_share(free_bytes(device), start.place, comm, device)
    model_comm = OrderedComm(graphs.comm) if start.invariant and comm.size > 1 else graphs.comm
    plan = build_model(spec.shape, model_comm, torch.device("meta"), start.dtype)
    if start.invariant:
        require_provable(plan, device)
    # A tied table: even on a GPU, kernels of invariant products have a copy.
    copied = plan.doubled_bytes if start.invariant and not start.on_cpu else 0
    thread_choices: Sequence[int] = set_threads(config.device.threads, device, plan.parameter_bytes)
    if start.on_cpu:
        thread_choices = common_choices(thread_choices, comm)
    kernels = _cpu_kernels(start) if start.on_cpu else None
    start.stages.begin("kernels")
    linears = choose_linears(config, spec, start.plugins, plan, device)
    _log_precision(start, linears)
    start.stages.begin("weights")
    load = partial(
        load_model,
        comm=model_comm,
        device=device,
        dtype=start.dtype,
        load_format=config.model.load_format,
        seed=config.device.seed,
        linears=linears,
        kernels=kernels,
    )
    model = load(
        spec,
        progress=start.progress,
        check_room=lambda needed: check_weights(spec, needed + copied, start.dtype, room, comm.size),
        share=start.stages.share,
    )

    # What a trainer sends in floats is rounded, as a second form of the experts would take twice the memory.
    rounds = isinstance(model, Decoder) and any(one.float8 for one in model.shape.experts)

    def reload(other: ModelSpec) -> Model:
        free = free_bytes(device) // (comm.size if start.on_cpu else 1)  # ranks on a CPU may share its memory
        again = load(
            other,
            progress=False,
            check_room=lambda needed: check_weights(other, needed + copied, start.dtype, free, comm.size),
            rounds_experts=rounds,
        )
        if start.invariant and isinstance(again, Decoder):
            again.by_rows()
        return again

    return Loaded(model, reload, kernels, thread_choices)


def _log_precision(start: Start, linears: Linears) -> None:
    """Log that products compute with more bits than the file stores, and what takes fewer."""
    kinds, dtype = ", ".join(block_kinds(start.spec.directory)), str(start.dtype).removeprefix("torch.")
    if not kinds or not start.on_cpu or start.config.model.quantization != "none":
        return
    if isinstance(linears.layers, RowKeeper):
        other = "model.quantization = 'int8' rounds inputs of products to 8 bits, and is faster"
        log.info("weights: stored as %s, kept so and multiplied as exactly as in %s; %s", kinds, dtype, other)
    else:
        other = (
            "model.quantization = 'int8' takes about 1.1 bytes for each and is the fastest on CPUs, 'float16' takes 2"
        )
        log.info("weights: stored as %s, computed in %s; %s", kinds, dtype, other)


def _choose_attention(start: Start, model: Model) -> RankAttention:
    """Choose before the pool takes the memory that is left: a plugin may refuse, and may need some to be tried."""
    kv = start.config.kv
    kind_of_pages = (model.attention_spec, kv.page_size, start.device, start.dtype, kv.layout, start.kv_dtype)
    measured = NOT_MEASURED
    if not start.invariant:  # a race may end otherwise at the next start, and another backend has other bits
        start.graphs.device.trim()  # contenders run in processes of their own
        widest = (model.attention_spec.widest, *kind_of_pages[1:])
        race = AttentionRace(start.plugins, *widest, limit_s=AttentionSettings.of(start.config).race_s)
        measured = measured_attention(race, start.comm, start.device, start.progress)
    return RankAttention(start.plugins, *kind_of_pages, measured, start.invariant)


def _new_rows(start: Start, model: Model) -> DeviceRows:
    kv, spec = start.config.kv, model.attention_spec
    kind = HostRows if start.on_cpu and not start.graphs.device.captures else DeviceRows
    return kind(
        start.config.scheduler.max_running,
        start.max_len,
        kv.page_size,
        start.device,
        page_stride(spec, kv.page_size, kv.layout),
    )


def _new_states(start: Start) -> RecurrentStates | None:
    """Return the states of recurrent layers, one slot for each row, and one for rows that pad captured steps; None for
    a model without such layers."""
    shape, num_slots = start.spec.shape, start.config.scheduler.max_running
    if not shape.recurrents:
        return None
    room = fair_share(free_bytes(start.device), start.place, start.comm, start.device)
    layers = shape.states_of_rank(start.comm.size)
    row_bytes = RecurrentStates(layers, 1, torch.device("meta")).data.nbytes
    check_states(num_slots, row_bytes, room)
    padding = int(start.graphs.device.captures)
    states = RecurrentStates(layers, num_slots + padding, start.device)
    what = "recurrent states: %.2f MB for each of %d rows, in %d of %d layers"
    log.info(what, row_bytes / 1e6, num_slots, len(layers), shape.num_layers)
    return states


def _new_sampler(start: Start, loaded: Loaded) -> Sampler:
    own_kernels = loaded.kernels if isinstance(loaded.model, Decoder) else None
    num_outputs, max_rows = start.spec.shape.num_outputs, start.config.scheduler.max_running
    return Sampler(max_rows, num_outputs, start.max_len, start.device, own_kernels)


def _prove(start: Start, model: Model, attention: RankAttention, sampler: Sampler) -> None:
    if isinstance(model, Decoder):
        model.by_rows()
        scheduler, kv = start.config.scheduler, start.config.kv
        prove_invariance(
            model,
            attention,
            start.comm,
            sampler,
            device=start.device,
            layout=kv.layout,
            kv_dtype=start.kv_dtype,
            page_size=kv.page_size,
            max_tokens=scheduler.max_step_tokens,
            max_rows=scheduler.max_running,
        )


def _context(
    start: Start, loaded: Loaded, rows: DeviceRows, states: RecurrentStates | None, given: Mapping[str, bytes]
) -> RankContext:
    return RankContext(
        config=start.config,
        spec=start.spec,
        max_len=start.max_len,
        plugins=start.plugins,
        comm=start.comm,
        device=start.device,
        dtype=start.dtype,
        place=start.place,
        progress=start.progress,
        model=loaded.model,
        rows=rows,
        states=states,
        reload=loaded.reload,
        given=given,
        graphs=start.graphs,
    )


def _new_runner(
    start: Start,
    loaded: Loaded,
    parts: StepParts,
    constraints: Constraints,
    features: Sequence[RankFeature],
    needs: Needs,
) -> ModelRunner:
    """Capture the steps, let the features build the rest, and put the runner together."""
    graphs, scheduler, model = start.graphs, start.config.scheduler, parts.model
    before = graphs.device.memory().free_bytes
    start.stages.begin("decode steps")
    in_c = _compiled_decodes(start, loaded, parts)
    start.stages.begin("threads")
    threads = _step_threads(start, loaded, parts, in_c)
    start.stages.begin("graphs")
    piecewise = graphs.piecewise(parts, scheduler, start.progress)
    whole = in_c or graphs.decode(parts, scheduler, start.progress)
    start.stages.begin("")
    _log_ready(start, parts)
    left = graphs.device.memory().free_bytes
    report(start.comm.rank, model, parts.pool, needs, before - left, left)
    pools = [pool for feature in features for pool in feature.pools]
    for feature in features:
        feature.build(parts.pool, pools, needs)
    model_around, piecewise_around = model, piecewise
    for feature in features:
        model_around = feature.around(model_around)
        piecewise_around = piecewise_around and feature.around(piecewise_around)
        whole = whole and feature.decodes(whole)
    timed = threads is not None and piecewise is None and start.comm.size == 1
    return ModelRunner(
        comm=start.comm,
        graphs=graphs.device,
        model=model_around,
        pool=parts.pool,
        attention=parts.attention,
        piecewise=piecewise_around,
        whole_decodes=whole,
        rows=parts.rows,
        states=parts.states,
        constraints=constraints,
        sampler=parts.sampler,
        eos_token_ids=start.spec.eos_token_ids if model.task_head is None else (),
        features=(*features, TimedSteps(parts.rows, threads)) if threads is not None and timed else features,
    )


def _compiled_decodes(start: Start, loaded: Loaded, parts: StepParts) -> CapturedDecodes | None:
    """Return decode steps as calls of C, or None if C does not compute what the model does."""
    if loaded.kernels is None:
        return None
    model, pool, rows = parts.model, parts.pool, parts.rows
    whole = compiled_decodes(model, pool, parts.attention, rows, parts.sampler, start.comm, parts.states)
    if start.invariant and whole is not None and isinstance(model, Decoder):
        prove_decodes(model, whole, parts.attention, pool, rows, parts.states)
    return whole


def _log_ready(start: Start, parts: StepParts) -> None:
    pool = parts.pool
    log.info(
        "rank %d ready: device=%s dtype=%s weights=%.1f MB kv_pool=%.1f MB (%d pages of %d tokens in %s)",
        start.comm.rank,
        start.device,
        str(start.dtype).removeprefix("torch."),
        parts.model.weight_bytes / 1e6,
        pool.data.nbytes / 1e6,
        pool.num_pages,
        pool.page_size,
        str(pool.format.stored).removeprefix("torch."),
    )


def _cpu_kernels(start: Start) -> CPUKernels | None:
    """Return the kernels of a model on a CPU, if they compute what it does.

    Graphs do not use them: a step that is recorded or compiled has operations of torch alone."""
    is_plain = start.dtype == torch.float32 and start.kv_dtype in ("", "float32")
    return cpu_kernels() if is_plain and start.graphs.mode == "off" else None


def _check_device(config: Config, device: torch.device) -> None:
    """Raise ConfigError for settings that cannot work on this device.

    A thread that waits on a GPU for a lost rank cannot be ended, nor can its memory be freed."""
    if config.model.numerics == "invariant" and config.graphs.mode == "compiled":
        raise ConfigError(
            "model.numerics=invariant with graphs.mode=compiled: compilers choose the order of sums; set "
            "graphs.mode=auto, or model.numerics=fast"
        )
    num_ranks, placement = config.device.tensor_parallel, config.placement.executor
    if device.type == "cuda" and num_ranks > 1 and placement == "inline":
        raise ConfigError(
            f"device.tensor_parallel={num_ranks} with placement.executor=inline: ranks on GPUs need processes of their "
            "own; set placement.executor=process"
        )


def _connect(config: Config, plugins: Plugins, rank: int, device: torch.device, rendezvous: str) -> Comm:
    context = CommContext(rank, config.device.tensor_parallel, device.type, rendezvous)
    name = comm_name(config, plugins, context)
    comm = plugins.build(name, context, Comm)
    if config.model.experts == "exchanged" and not isinstance(comm, ExchangingComm):
        raise ConfigError(f'model.experts="exchanged": {name} has no all_to_all; set it to "divided", or plugins.comm')
    return comm


def comm_name(config: Config, plugins: Plugins, context: CommContext) -> str:
    """Return the communication library's full name.

    'auto' sums in memory that GPUs share where ranks meet in a file, as those of one machine do; that library tries the
    memory first, and is as 'torch' without it.  Options of 'torch' are a wish for 'torch'."""
    name, shared = plugins.names["comm"], "comm.symmetric"
    one_machine = context.size > 1 and context.device == "cuda" and context.rendezvous.startswith("file:")
    if named(config.plugins, "comm") == "auto" and one_machine and name not in plugins.options:
        log.info("plugin: %s (auto: ranks are GPUs of one machine)", shared)
        return plugins.load(shared).name
    return name


def _own_grammars(start: Start) -> Grammars | None:
    """Return grammars for a process without a text side: its tokenizer is read when the first grammar comes."""
    config, spec = start.config, start.spec

    def codec() -> TextCodec:
        return plugin_codec(config, resolve_checkpoint(config.model.path, config.model.revision))

    return plugin_grammars(start.plugins, codec, vocab_size=spec.vocab_size, eos_token_ids=spec.eos_token_ids)


def _step_threads(
    start: Start, loaded: Loaded, parts: StepParts, whole_decodes: CapturedDecodes | None
) -> StepThreads | None:
    """Measure numbers of threads, if there is a choice.  The sampler's rows are free, and all pages are empty.

    Invariant numerics are proved with one number of threads, and a model that pools runs no decode steps."""
    config, choices = start.config, loaded.thread_choices
    if not choices or start.invariant or parts.model.task_head is not None:
        return None
    steps, greedy = ModelSteps(parts), SamplingParams(temperature=0.0)
    length, most_rows = min(start.max_len, RACE_CONTEXT), config.scheduler.max_running

    def step(rows: int) -> None:
        rows = min(rows, most_rows)
        lengths = np.full(rows, length, dtype=np.int32)
        if whole_decodes is not None and whole_decodes.fits(rows):
            whole_decodes.launch(np.arange(rows), lengths, SamplingVariant.GREEDY)
        else:
            steps.run(lengths, np.ones(rows, dtype=np.int32), rows, greedy)

    holds_for = (choices, start.spec.shape, start.config.model.quantization, str(start.dtype), str(torch.__version__))
    kept = KeptResults("threads", processor_name(start.device), holds_for, int)
    race = ThreadRace(start.comm, step, kept=kept)
    return StepThreads(choices, race.run(choices), is_measured=race.is_measured)
