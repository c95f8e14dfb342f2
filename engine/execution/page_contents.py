"""A digest of all that the bytes of a page depend on besides its tokens.

Owns: the digest.  Does not know: which features compare pages of different engines.
"""

import hashlib

import torch

from engine.checkpoints.fingerprint import fingerprint
from engine.execution.features import RankContext
from engine.kernels.levels import levels_here
from engine.layers.kv_pool import KVPool
from engine.plugins.kinds import ATTENTION, LINEAR, named
from engine.settings.own_kernels import kernels_here


def page_namespace(context: RankContext, pool: KVPool) -> bytes:
    """Return a digest of all that the bytes of a page depend on, except its tokens."""
    config, comm, page = context.config, context.comm, pool.by_page[0]
    load_format = config.model.load_format
    seed = config.device.seed if load_format == "dummy" else None
    shape = (str(pool.dtype), pool.format.kv_dtype, tuple(page.shape))
    arithmetic: tuple[object, ...] = (config.model.quantization, config.model.numerics)
    if config.model.numerics == "invariant":
        place = (pool.data.device.type, kernels_here(), levels_here("")[0].name, torch.__version__)
        arithmetic += (*place, named(config.plugins, ATTENTION), named(config.plugins, LINEAR))
    what = (3, fingerprint(context.spec, load_format), seed, *arithmetic, *shape, comm.rank, comm.size)
    return hashlib.sha256(repr(what).encode()).digest()
