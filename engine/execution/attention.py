"""One rank's attention: chosen, and tried if it is not built in, before the KV pool is allocated; then built over it.

Owns: the order of that, and the next choice if 'auto' has chosen a backend that cannot be built after all.
Does not know: which backends there are, kernels.
"""

from dataclasses import replace
from functools import partial

import torch

from engine.execution.split_attention import SplitAttention
from engine.execution.third_party import build_foreign, try_foreign
from engine.host.timeouts import named_while_slow
from engine.layers.attention import AttentionBackend, AttentionSpec
from engine.layers.kv_pool import KVPool, Layout
from engine.layers.mixed_attention import build_attention
from engine.plugins.hookspecs import AttentionContext
from engine.plugins.manager import Plugins
from engine.plugins.selection import NOT_MEASURED, Measured, choose_attention
from engine.types.errors import PluginError


def context_of(
    spec: AttentionSpec,
    page_size: int,
    device: torch.device,
    dtype: torch.dtype,
    layout: Layout = "layer_first",
    kv_dtype: str = "",
    invariant: bool = False,
) -> AttentionContext:
    """Return the context that a rank's attention plugins get, for both phases and without options."""
    return AttentionContext(
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        page_size=page_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        window=spec.window,
        needs=spec.needs,
        kv_layout=layout,
        kv_dtype=kv_dtype,
        invariant=invariant,
    )


class RankAttention:
    """The chosen attention backends.  Raises PluginError if none can run here, or one fails its trial."""

    def __init__(
        self,
        plugins: Plugins,
        spec: AttentionSpec,
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
        layout: Layout = "layer_first",
        kv_dtype: str = "",
        measured: Measured = NOT_MEASURED,
        invariant: bool = False,
    ) -> None:
        self._plugins = plugins
        self._spec = spec
        self._measured = measured
        widest = replace(spec.widest, window=spec.window)  # one backend is for all layers, also for those with a window
        self._context = context_of(widest, page_size, device, dtype, layout, kv_dtype, invariant)
        self._choices = choose_attention(plugins, self._context, measured=measured)
        for choice in self._choices:
            if not choice.info.built_in:
                for _, one in spec.kinds:
                    try_foreign(choice, one, page_size, device, dtype, layout, kv_dtype)

    def build(self, pool: KVPool) -> AttentionBackend:
        """Return one backend, or two behind one.  Raises PluginError if one chosen by name cannot be built."""
        choices, refused = self._choices, dict[str, str]()
        while True:
            backends: list[AttentionBackend] = []
            for choice in choices:
                build = choice.factory if choice.info.built_in else partial(build_foreign, choice)
                try:
                    with named_while_slow(f"plugin {choice.info.label}: building its backend"):
                        backends.append(build_attention(build, self._spec, pool))
                except PluginError as error:
                    if not choice.auto:
                        raise
                    refused[choice.info.short] = str(error)
                    break
            else:
                if len(backends) == 1:
                    return backends[0]
                return SplitAttention(prefill=backends[0], decode=backends[1], value_size=self._spec.latent_size)
            choices = choose_attention(self._plugins, self._context, refused, self._measured)
