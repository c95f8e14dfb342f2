"""From a configuration to a runner: device, plugins, weights, KV pool, host pool, sampler, in that order.

Owns: how one rank is put together, and the sizes that follow from its memory.  Does not know: actors, steps.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from engine.checkpoints.checkpoint import ModelSpec, resolve_checkpoint
from engine.checkpoints.fingerprint import fingerprint
from engine.config import Config
from engine.execution.adapters import AdaptedRunner, rank_adapters
from engine.execution.attention import RankAttention
from engine.execution.captured_steps import CapturedDecodes
from engine.execution.compiled_decodes import compiled_decodes
from engine.execution.copy_stream import copies_on
from engine.execution.device import choose_device, choose_dtype, fair_share, free_bytes, host_place, set_threads
from engine.execution.drafting import DraftingRunner
from engine.execution.host_pool import HostPool
from engine.execution.host_rows import HostRows
from engine.execution.landings import LandedAttention, Landings
from engine.execution.rows import DeviceRows
from engine.execution.runner import ModelRunner
from engine.execution.step_threads import StepThreads, WatchedRunner
from engine.execution.stored_pages import StoredPages
from engine.graphs.passes import build_passes
from engine.graphs.rank import RankGraphs, StepParts
from engine.host.memory import available_bytes
from engine.kernels.cpu import CPUKernels, cpu_kernels
from engine.kv.store import DIGEST_BYTES, KVStore, PageRecords
from engine.layers.attention import AttentionBackend
from engine.layers.comm import Comm
from engine.layers.kv_pool import KVPool
from engine.layers.ordered_comm import OrderedComm
from engine.models.decoder import Decoder
from engine.models.loader import load_model
from engine.models.model import build_model
from engine.plugins.hookspecs import CommContext, KVStoreContext
from engine.plugins.kinds import KV_STORE, LOGITS_PROCESSOR
from engine.plugins.manager import Plugins
from engine.plugins.parsers import plugin_codec
from engine.plugins.selection import NOT_MEASURED
from engine.plugins.structured import plugin_grammars, plugin_processors
from engine.plugins.support.paging import new_pool, page_bytes
from engine.sampling.captured import Variant
from engine.sampling.constraints import Constraints
from engine.sampling.processing import Processing
from engine.sampling.sampler import Sampler
from engine.scheduling.proposer import DraftModel
from engine.settings.own_kernels import kernels_here
from engine.startup.draft_model import RankDraft
from engine.startup.eagle_head import RankHead
from engine.startup.invariance import prove_decodes, prove_invariance, require_provable
from engine.startup.linears import choose_linears
from engine.startup.memory import (
    MAX_CPU_POOL_BYTES,
    MAX_HOST_SHARE,
    Needs,
    check_weights,
    host_needs,
    pool_pages,
    report,
    require_room,
    run_largest_step,
)
from engine.startup.model_steps import ModelSteps
from engine.startup.race import Race, measured_attention
from engine.startup.thread_race import ThreadRace, common_choices
from engine.text.codec import TextCodec
from engine.text.grammar import Grammars
from engine.types.errors import ConfigError
from engine.types.params import SamplingParams

log = logging.getLogger(__name__)

RACE_CONTEXT = 256  # tokens of each sequence in the steps that threads are measured with


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
    draft: DraftModel | None = None,
    num_proposed: int = 0,
) -> ModelRunner | WatchedRunner | AdaptedRunner | DraftingRunner:
    """Everything a rank needs, ready for its first step.  Runs on the device thread, of all ranks at the same time.
    local_rank: which GPU of this machine it takes; None for the one of its rank's number.
    rendezvous: where this group's ranks meet, see ``CommContext``; empty for one rank.
    num_pages: of the runner before this one, whose pages it must have; 0 for kv.num_pages, or what fits.
    grammars: those of this process, where the text side lives in it as well.
    draft: the model that drafts what steps verify; None if none does.  num_proposed: most that they verify of a row.

    Raises ConfigError, WeightsError, PluginError, GraphError with a message for the user."""
    device = choose_device(config.device, rank if local_rank is None else local_rank)
    _check_device(config, device)
    dtype = choose_dtype(config.model.dtype, device, spec.dtype)
    invariant = config.model.numerics == "invariant"
    comm = _connect(config, plugins, rank, device, rendezvous)
    graphs = RankGraphs(config.graphs, device, comm, build_passes(plugins, device, dtype))
    seed, load_format = config.device.seed, config.model.load_format
    on_cpu = device.type == "cpu"
    place = host_place() if on_cpu else comm.rank
    graphs.device.trim()  # of what a runner before this one has left
    room = fair_share(free_bytes(device), place, comm, device)
    model_comm = OrderedComm(graphs.comm) if invariant and comm.size > 1 else graphs.comm
    plan = build_model(spec.shape, model_comm, torch.device("meta"), dtype)
    if invariant:
        require_provable(plan)
    # A tied table: on a GPU, too, kernels of invariant products have a copy.
    copied = plan.doubled_bytes if invariant and not on_cpu else 0
    thread_choices: Sequence[int] = set_threads(config.device.threads, device, plan.parameter_bytes)
    if on_cpu:
        thread_choices = common_choices(thread_choices, comm)
    kernels = _cpu_kernels(config, dtype, graphs) if on_cpu else None
    model = load_model(
        spec,
        model_comm,
        device,
        dtype,
        load_format=load_format,
        seed=seed,
        progress=progress,
        linears=choose_linears(config, spec, plugins, plan, device),
        check_room=lambda needed: check_weights(spec, needed + copied, dtype, room, comm.size),
        kernels=kernels,
    )
    drafting = None
    if draft is not None:
        kind = RankHead if draft.reads_states else RankDraft
        drafting = kind(draft, config, plugins, comm, device=device, dtype=dtype, place=place, progress=progress)
    attention_spec = model.attention_spec
    # Before the pool takes what memory is left: a plugin may refuse, and may need some to be tried.
    page_size, layout = config.kv.page_size, config.kv.layout
    kv_dtype = config.kv.kept_as(str(dtype).removeprefix("torch."))
    place_of_pages = (attention_spec, page_size, device, dtype, layout, kv_dtype)
    measured = NOT_MEASURED
    if not invariant:  # a race may end otherwise at the next start, and another backend has other bits
        graphs.device.trim()  # contenders run in processes of their own
        race = Race(plugins, *place_of_pages, limit_s=config.plugins.race_s)
        measured = measured_attention(race, comm, device, progress)
    attention = RankAttention(plugins, *place_of_pages, measured, invariant)
    max_rows, max_tokens = config.scheduler.max_running, config.scheduler.max_step_tokens
    page_stride = KVPool.page_stride_of(layout, attention_spec.num_layers, page_size, attention_spec.latent_size)
    kind_of_rows = HostRows if on_cpu and not graphs.device.captures else DeviceRows
    rows = kind_of_rows(max_rows, max_len, page_size, device, page_stride)
    own_kernels = kernels if isinstance(model, Decoder) else None
    sampler = Sampler(max_rows, spec.shape.num_outputs, max_len, device, own_kernels)
    if invariant and isinstance(model, Decoder):
        model.by_rows()
        sizes = {"page_size": page_size, "max_tokens": max_tokens, "max_rows": max_rows}
        prove_invariance(model, attention, comm, sampler, device=device, layout=layout, kv_dtype=kv_dtype, **sizes)
    if plugins.several.get(LOGITS_PROCESSOR):
        sampler.processing = Processing(plugin_processors(plugins, spec.vocab_size), rows.tokens_RM)
    adapters = rank_adapters(config.lora, model, comm, config.scheduler.max_running)

    landings = Landings(copies_on(device))

    def parts_with(num_pages: int) -> StepParts:
        pool = new_pool(attention_spec, num_pages, page_size, dtype, device, layout, kv_dtype)
        if drafting is not None:
            drafting.tap(model, num_pages)
        backend = attention.build(pool)
        if config.kv.num_host_pages and landings.copies.overlaps:
            backend = LandedAttention(backend, landings)
        # Only now: what 'auto' comes to has been loaded by this time.
        graphs.break_at([name for one in plugins.declarations.values() for name in one.graph_breaks])
        return StepParts(model, pool, backend, rows, sampler)

    known = bool(num_pages)  # it has fitted, and the number may be none that the user has set
    num_pages = num_pages or config.kv.num_pages
    needs = host_needs(config, spec.shape, max_len, dtype, num_proposed) if on_cpu else Needs()
    if on_cpu and adapters is not None:
        needs = replace(needs, adapter_bytes=adapters.nbytes)
    if not num_pages and graphs.device.captures:
        built = lambda: (parts_with(1), None if drafting is None else drafting.attention(1))  # noqa: E731
        needs = _measure(config, max_len, graphs, built, num_proposed)
    graphs.device.trim()
    bytes_of_page = page_bytes(attention_spec, page_size, dtype, kv_dtype)
    if drafting is not None:
        bytes_of_page += drafting.page_bytes
        needs = drafting.needs(needs, max_len)
    room = fair_share(free_bytes(device), place, comm, device)
    if not num_pages:
        room = min(room, MAX_CPU_POOL_BYTES + needs.total) if on_cpu else room
        num_pages = _smallest(pool_pages(config, max_len, bytes_of_page, room, needs), comm, device)
    elif not known:
        asked = f"kv.num_pages={num_pages}: {num_pages * bytes_of_page / 1e9:.1f} GB of memory"
        require_room(asked, num_pages, bytes_of_page, room, MAX_HOST_SHARE if on_cpu else 1.0, needs)
    try:
        parts = parts_with(num_pages)
        drafter = drafting.drafter(num_pages, rows, spec.vocab_size) if drafting is not None else None
    except (MemoryError, torch.OutOfMemoryError) as error:
        asked = f"{num_pages * bytes_of_page / 1e9:.1f} GB for a KV pool of {num_pages} pages"
        raise ConfigError(f"{asked} cannot be had ({error}); lower kv.num_pages or kv.memory_fraction") from None
    pool, before = parts.pool, graphs.device.memory().free_bytes
    whole_decodes: CapturedDecodes | None = None
    if kernels is not None:
        whole_decodes = compiled_decodes(model, pool, parts.attention, rows, sampler, comm)
        if invariant and whole_decodes is not None and isinstance(model, Decoder):
            prove_decodes(model, whole_decodes, parts.attention, pool, rows)
    # Invariant numerics are proved with one number of threads, and compiled pieces are made for one.
    threads = None
    if thread_choices and not invariant and model.pooled_head is None:
        threads = _measured_threads(thread_choices, config, max_len, parts, whole_decodes, comm)
    piecewise = graphs.piecewise(parts, config.scheduler, progress)
    whole_decodes = whole_decodes or graphs.decode(parts, config.scheduler, progress)
    log.info(
        "rank %d ready: device=%s dtype=%s weights=%.1f MB kv_pool=%.1f MB (%d pages of %d tokens in %s)",
        rank,
        device,
        str(dtype).removeprefix("torch."),
        model.weight_bytes / 1e6,
        pool.data.nbytes / 1e6,
        num_pages,
        page_size,
        str(pool.format.stored).removeprefix("torch."),
    )
    left = graphs.device.memory().free_bytes
    report(rank, model, pool, needs, before - left, left)
    runner = ModelRunner(
        comm=comm,
        graphs=graphs.device,
        model=model if adapters is None else adapters.around(model),
        pool=pool,
        host_pool=_host_pool(config.kv.num_host_pages, pool, landings, comm, needs),
        stored=_stored_pages(config, spec, plugins, pool, comm),
        attention=parts.attention,
        piecewise=piecewise if adapters is None or piecewise is None else adapters.around(piecewise),
        whole_decodes=whole_decodes if adapters is None or whole_decodes is None else adapters.beside(whole_decodes),
        rows=rows,
        constraints=Constraints(grammars or _own_grammars(config, spec, plugins), spec.vocab_size, device),
        sampler=sampler,
        eos_token_ids=spec.eos_token_ids if model.pooled_head is None else (),
    )
    watched: ModelRunner | WatchedRunner = runner
    if threads is not None and piecewise is None and comm.size == 1:
        watched = WatchedRunner(runner, rows, threads)
    adapted = watched if adapters is None else AdaptedRunner(watched, adapters)
    return adapted if drafter is None else DraftingRunner(adapted, rows, drafter, alone=comm.size == 1)


def _cpu_kernels(config: Config, dtype: torch.dtype, graphs: RankGraphs) -> CPUKernels | None:
    """Those of a model on a CPU, if they compute what it does.

    No graph has them: what records or compiles a step sees operations of torch alone."""
    is_plain = dtype == torch.float32 and config.kv.kept_as("float32") in ("", "float32")
    return cpu_kernels() if is_plain and graphs.mode == "off" else None


def _check_device(config: Config, device: torch.device) -> None:
    """Raise ConfigError for settings that this device has no use for.

    A thread that waits on a GPU for a rank that is gone cannot be ended, nor can what it holds be freed."""
    if config.model.numerics == "invariant" and config.graphs.mode == "compiled":
        raise ConfigError(
            "model.numerics=invariant with graphs.mode=compiled: compilers order sums as they like; set "
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
    return plugins.build(plugins.names["comm"], context, Comm)


def _own_grammars(config: Config, spec: ModelSpec, plugins: Plugins) -> Grammars:
    """For a process that has no text side: its tokenizer is read when the first grammar comes."""

    def codec() -> TextCodec:
        return plugin_codec(config, resolve_checkpoint(config.model.path, config.model.revision))

    return plugin_grammars(plugins, codec, vocab_size=spec.vocab_size, eos_token_ids=spec.eos_token_ids)


def _smallest(number: int, comm: Comm, device: torch.device) -> int:
    """Of all ranks' numbers: one scheduler plans for all of them."""
    if comm.size == 1:
        return number
    return int(comm.all_gather(torch.tensor([number], device=device), 0).min())


def _measure(
    config: Config,
    max_len: int,
    graphs: RankGraphs,
    build: Callable[[], tuple[StepParts, AttentionBackend | None]],
    num_proposed: int,
) -> Needs:
    """build: parts with a pool that is thrown away, and a draft model's attention.

    Raises ConfigError if there is no room for the largest step itself."""
    free = graphs.device.memory().free_bytes
    parts, of_draft = build()
    graphs.device.trim()
    attention_bytes = max(0, free - graphs.device.memory().free_bytes)
    del of_draft
    scheduler = config.scheduler
    try:
        activation_bytes = graphs.device.peak(lambda: run_largest_step(config, max_len, _steps_of(parts), num_proposed))
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"scheduler.max_step_tokens={scheduler.max_step_tokens}: no room for a step of that size beside "
            f"the weights ({error}); lower it, or scheduler.max_running"
        ) from None
    graphs.device.trim()
    return Needs(activation_bytes, graphs.measure(parts, scheduler), attention_bytes=attention_bytes)


def _measured_threads(
    choices: Sequence[int],
    config: Config,
    max_len: int,
    parts: StepParts,
    whole_decodes: CapturedDecodes | None,
    comm: Comm,
) -> StepThreads:
    """Rows of ``parts.sampler`` must be free, and no page may hold anything."""
    steps, greedy = _steps_of(parts), SamplingParams(temperature=0.0)
    length, most_rows = min(max_len, RACE_CONTEXT), config.scheduler.max_running

    def step(rows: int) -> None:
        rows = min(rows, most_rows)
        lengths = np.full(rows, length, dtype=np.int32)
        if whole_decodes is not None and whole_decodes.fits(rows):
            whole_decodes.launch(np.arange(rows), lengths, Variant.GREEDY)
        else:
            steps.run(lengths, np.ones(rows, dtype=np.int32), rows, greedy)

    return StepThreads(choices, ThreadRace(comm, step).run(choices))


def _steps_of(parts: StepParts) -> ModelSteps:
    return ModelSteps(parts.model, parts.pool, parts.attention, parts.sampler)


def _stored_pages(config: Config, spec: ModelSpec, plugins: Plugins, pool: KVPool, comm: Comm) -> StoredPages | None:
    """Between the pool and plugins.kv_store, or None if there is none.  Raises PluginError."""
    if (name := plugins.names.get(KV_STORE)) is None:
        return None
    page = pool.by_page[0]
    load_format = config.model.load_format
    seed = config.device.seed if load_format == "dummy" else None
    shape = (str(pool.dtype), pool.format.kv_dtype, tuple(page.shape))
    arithmetic: tuple[object, ...] = (config.model.quantization, config.model.numerics)
    if config.model.numerics == "invariant":
        place = (pool.data.device.type, kernels_here(), torch.__version__)
        arithmetic += (*place, config.plugins.attention, config.plugins.linear)
    what = (2, fingerprint(spec, load_format), seed, *arithmetic, *shape, comm.rank, comm.size)
    namespace = hashlib.sha256(repr(what).encode()).digest()
    context = KVStoreContext(DIGEST_BYTES + page.nbytes, namespace.hex(), comm.rank, comm.size)
    store = plugins.build(name, context, KVStore)
    records = PageRecords(store, namespace, page.nbytes)
    return StoredPages(records, pool, comm.rank, config.kv.store_buffer_mb << 20)


def _host_pool(num_pages: int, pool: KVPool, landings: Landings, comm: Comm, needs: Needs) -> HostPool | None:
    """kv.num_host_pages of host memory, or None for 0.  needs: of the pool's device."""
    if not num_pages:
        return None
    page_bytes = pool.data.nbytes // (pool.num_pages + 1)  # the pool has its dump page beside them
    on_cpu = pool.data.device.type == "cpu"
    # A pool on CPU takes its memory only as pages are written, so it is still among what is available.
    available = fair_share(available_bytes(), host_place(), comm, pool.data.device)
    available = max(0, available - (pool.data.nbytes if on_cpu else 0))
    asked = f"kv.num_host_pages={num_pages}: {num_pages * page_bytes / 1e9:.1f} GB of host memory"
    require_room(asked, num_pages, page_bytes, available, MAX_HOST_SHARE, needs if on_cpu else Needs())
    try:
        host_pool = HostPool(num_pages, pool, landings)
    except MemoryError as error:
        raise ConfigError(f"{asked} cannot be had ({error}); lower it") from None
    log.info(
        "rank %d host_pool=%.1f MB (%d pages)%s",
        comm.rank,
        host_pool.num_bytes / 1e6,
        num_pages,
        "" if on_cpu else ", page-locked",
    )
    return host_pool
