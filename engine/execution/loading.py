"""From a configuration to a runner: device, plugins, weights, KV pool, host pool, sampler, in that order.

Owns: how one rank is put together, and the sizes that follow from its memory.  Does not know: actors, steps.
"""

import logging

import torch

from engine.config import Config
from engine.errors import ConfigError, PluginError
from engine.execution.device import choose_device, choose_dtype, free_bytes, set_threads
from engine.execution.host_memory import available_bytes
from engine.execution.rows import DeviceRows
from engine.execution.runner import ModelRunner
from engine.kv.host_pool import HostPool
from engine.kv.pool import KVPool
from engine.layers.attention import AttentionFactory, AttentionSpec
from engine.models.checkpoint import ModelSpec
from engine.models.loader import load_model
from engine.plugins.hookspecs import AttentionContext, CommContext
from engine.plugins.manager import Plugins
from engine.sampling.sampler import Sampler

log = logging.getLogger(__name__)

MAX_HOST_SHARE = 0.9  # of the available host memory: page-locked memory cannot be swapped, and others need some
POOL_SEQUENCES = 4  # a pool beyond this many full batches buys nothing until prefixes are shared


def load_runner(
    config: Config, spec: ModelSpec, max_len: int, plugins: Plugins, *, rank: int, progress: bool
) -> ModelRunner:
    """Everything a rank needs, ready for its first step.  Runs on the device thread.

    Raises ConfigError, WeightsError, PluginError with a message for the user."""
    device = choose_device(config.device, rank)
    dtype = choose_dtype(config.model.dtype, device, spec.dtype)
    options = config.plugins.options
    comm = plugins.hook.callboard_comm(
        context=CommContext(rank=rank, size=1, device=device.type, options=options.get(plugins.names["comm"], {}))
    )
    model = load_model(
        spec, comm, device, dtype, load_format=config.model.load_format, seed=config.device.seed, progress=progress
    )
    set_threads(config.device.threads, device, model.parameter_bytes)
    attention_spec = model.attention_spec
    factory = _attention_factory(config, plugins, attention_spec, device, dtype)
    num_pages = _num_pages(config, attention_spec, max_len, device, dtype)
    pool = KVPool(
        num_layers=attention_spec.num_layers,
        num_pages=num_pages,
        page_size=config.kv.page_size,
        num_kv_heads=attention_spec.num_kv_heads,
        head_size=attention_spec.head_size,
        dtype=dtype,
        device=device,
    )
    max_rows = config.scheduler.max_running
    log.info(
        "rank %d ready: device=%s dtype=%s weights=%.1f MB kv_pool=%.1f MB (%d pages of %d tokens)",
        rank,
        device,
        str(dtype).removeprefix("torch."),
        model.parameter_bytes / 1e6,
        pool.data.nbytes / 1e6,
        num_pages,
        config.kv.page_size,
    )
    return ModelRunner(
        rank=rank,
        model=model,
        pool=pool,
        host_pool=_host_pool(config.kv.num_host_pages, pool, rank),
        attention=factory(attention_spec, pool),
        rows=DeviceRows(max_rows, max_len, config.kv.page_size, device),
        sampler=Sampler(max_rows, spec.vocab_size, max_len, device),
        eos_token_ids=spec.eos_token_ids,
    )


def _attention_factory(
    config: Config, plugins: Plugins, spec: AttentionSpec, device: torch.device, dtype: torch.dtype
) -> AttentionFactory:
    name = plugins.names["attention"]
    factory: AttentionFactory | None = plugins.hook.callboard_attention_backend(
        context=AttentionContext(
            device=device.type,
            dtype=str(dtype).removeprefix("torch."),
            page_size=config.kv.page_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            window=spec.window,
            options=config.plugins.options.get(name, {}),
        )
    )
    if factory is None:
        raise PluginError(f"plugin {name} built no attention backend; it must implement callboard_attention_backend")
    return factory


def _num_pages(config: Config, spec: AttentionSpec, max_len: int, device: torch.device, dtype: torch.dtype) -> int:
    """kv.num_pages, or what fits the free memory; at least one sequence of full length must fit."""
    page_size = config.kv.page_size
    per_sequence = -(-max_len // page_size)
    if config.kv.num_pages:
        return config.kv.num_pages
    page_bytes = KVPool.page_bytes(spec.num_layers, page_size, spec.num_kv_heads, spec.head_size, dtype)
    fitting = int(free_bytes(device) * config.kv.memory_fraction) // page_bytes
    if fitting < per_sequence:
        raise ConfigError(
            f"kv.memory_fraction={config.kv.memory_fraction}: leaves room for {fitting} pages of {page_size} tokens, "
            f"one sequence of {max_len} tokens needs {per_sequence}; raise it, lower model.max_len, or set kv.num_pages"
        )
    return min(fitting, per_sequence * config.scheduler.max_running * POOL_SEQUENCES)


def _host_pool(num_pages: int, pool: KVPool, rank: int) -> HostPool | None:
    """kv.num_host_pages of host memory, or None for 0."""
    if not num_pages:
        return None
    page_bytes = pool.data.nbytes // (pool.num_pages + 1)  # the pool has its dump page beside them
    on_cpu = pool.data.device.type == "cpu"
    # A pool on CPU takes its memory only as pages are written, so it is still among what is available.
    available = max(0, available_bytes() - (pool.data.nbytes if on_cpu else 0))
    fitting = int(available * MAX_HOST_SHARE) // page_bytes
    asked = f"kv.num_host_pages={num_pages}: {num_pages * page_bytes / 1e9:.1f} GB of host memory"
    if num_pages > fitting:
        raise ConfigError(
            f"{asked} asked for, {available / 1e9:.1f} GB are available, of which {MAX_HOST_SHARE:.0%} may be used; "
            f"lower it to {fitting} or less"
        )
    try:
        host_pool = HostPool(num_pages, pool)
    except MemoryError as error:
        raise ConfigError(f"{asked} cannot be had ({error}); lower it") from None
    log.info(
        "rank %d host_pool=%.1f MB (%d pages)%s",
        rank,
        host_pool.data.nbytes / 1e6,
        num_pages,
        "" if on_cpu else ", page-locked",
    )
    return host_pool
