"""Checks of plugins with compiled GPU kernels before the engine starts, and their errors.

Owns: the wording, and a first call of every kernel at start, so that failures occur there and not in a request.
Does not know: any library.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from engine.layers.attention import AttentionBackend, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.support.paging import batch_on
from engine.types.errors import PluginError

MOST_OF_AN_ERROR = 500
MIN_CAPABILITY = (8, 0)  # Ampere, the first with bfloat16 and asynchronous copies
ANYTHING_ELSE = "or set plugins.attention=torch, which runs everywhere"


def require_capability(plugin: str, capability: tuple[int, int]) -> None:
    """Raise PluginError for a GPU that is too old."""
    if capability < MIN_CAPABILITY:
        need, have = (f"{major}.{minor}" for major, minor in (MIN_CAPABILITY, capability))
        raise PluginError(f"{plugin} needs compute capability {need}, this GPU has {have}; set plugins.attention=torch")


def missing_package(plugin: str, packages: str, reason: str) -> PluginError:
    """Return the error for a library that cannot be imported."""
    return PluginError(
        f"{plugin} needs {packages}, which cannot be imported ({reason}); "
        f"pip install 'callboard[cuda]', {ANYTHING_ELSE}"
    )


def try_out(
    plugin: str,
    backend: AttentionBackend,
    spec: AttentionSpec,
    pool: KVPool,
    num_queries: int,
    phases: tuple[str, ...] = ("prefill", "decode"),
) -> None:
    """Run a decode row, a prompt of ``num_queries`` tokens, or both, over the dump page, in two layers.

    Libraries compile or load kernels at their first call, which can take minutes and fail for some shapes.
    Raises PluginError with the library's error.
    """
    device = pool.data.device
    sequences = [1] * ("decode" in phases) + [num_queries] * ("prefill" in phases)
    lengths = np.array(sequences, dtype=np.int32)
    table = np.full((len(lengths), -(-num_queries // pool.page_size)), pool.dump_page, dtype=np.int32)
    batch = batch_on(device, int("decode" in phases), table, lengths, lengths)
    with trial(plugin, device):
        shape = (int(lengths.sum()), spec.num_heads, spec.head_size)
        q_TNH = torch.zeros(shape, dtype=pool.dtype, device=device)
        backend.plan_step(batch)
        # Layers with a window have kernels of their own, which are prepared in the first of them.
        firsts = {spec.window_of(layer): layer for layer in reversed(range(spec.num_layers))}
        for layer in sorted(firsts.values()):
            backend.attend(layer, q_TNH)


@contextmanager
def trial(plugin: str, device: torch.device) -> Iterator[None]:
    """Wrap a library's first calls.  Raises PluginError with the library's error if one of them fails."""
    try:
        with torch.inference_mode():
            yield
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    except Exception as error:  # for any error of a library the user needs one line and a way out
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if len(reason) > MOST_OF_AN_ERROR:  # a compiler shows code first, and says at the end what is wrong with it
            reason = f"{reason[:100]} ... {reason[-MOST_OF_AN_ERROR:]}"
        raise PluginError(f"{plugin} fails on a trial run ({reason}); {ANYTHING_ELSE[3:]}") from error
