"""The conformance kit for attention backends: one call checks a backend, and lists every case that fails.

    from engine.plugins.testing.attention import check_attention_backend, through_hook
    check_attention_backend(through_hook(callboard_attention_backend), Declaration(api=1, devices=("cpu",)))

Owns: taking a backend through all cases, within a time limit.  Does not know: how a case is run, which cases there are.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from engine.host.timeouts import returns_within
from engine.layers.attention import (
    AttentionBackend,
    AttentionFactory,
    AttentionSpec,
)
from engine.layers.kv_pool import KVPool
from engine.plugins.declaration import Declaration
from engine.plugins.hookspecs import AttentionContext
from engine.plugins.proof.attention import NUM_LAYERS, TOLERANCES, UNUSUAL_SCALE, check_case
from engine.plugins.proof.findings import Findings
from engine.plugins.proof.invariance import layers_needed, pages_needed, require_same_bits
from engine.plugins.support.paging import new_pool
from engine.plugins.testing.attention_cases import attention_cases

CASE_TIMEOUT_S = 300.0  # kernels that are compiled at their first call take minutes


def check_attention_backend(
    factory: AttentionFactory, declares: Declaration, device: str = "cpu", invariant: AttentionFactory | None = None
) -> None:
    """Check a backend in everything it declares.  Raises ConformanceError with every case that fails.

    factory: returned by the plugin's hook, or ``through_hook`` of the hook, to check that as well.
    invariant: the factory for a context that asks for invariant results, if it is another one.
    A case that has not ended after CASE_TIMEOUT_S has failed, and is the last one.
    """
    findings = Findings(f"attention backend on {device}")
    has_ended = True
    for case in attention_cases(declares):
        with findings.case(str(case)):
            has_ended = returns_within(CASE_TIMEOUT_S, partial(check_case, case, factory, device), str(case))
            assert has_ended, f"was not done after {CASE_TIMEOUT_S:g} s; later cases were not run"
        if not has_ended:
            break
    if declares.invariant and has_ended:
        for dtype in declares.dtypes or tuple(TOLERANCES):
            with findings.case(f"{dtype}: the same bits in every step"):
                require_invariance(invariant or factory, declares, dtype, device)
    findings.conclude()


def require_invariance(factory: AttentionFactory, declares: Declaration, dtype: str, device: str = "cpu") -> None:
    """Cut the same sequences into other steps.  Raises AssertionError with the first token whose bits differ."""
    head_size = next((size for size in (64, 128, 80) if not declares.head_sizes or size in declares.head_sizes), 64)
    page_size = next((size for size in (16, 64, 256, 1) if not declares.page_sizes or size in declares.page_sizes), 16)
    for num_kv_heads, ratio in ((2, 2), (1, 3), (3, 1)):
        if declares.heads_per_kv_head and ratio not in declares.heads_per_kv_head:
            continue
        spec = AttentionSpec(
            num_layers=NUM_LAYERS,
            num_heads=num_kv_heads * ratio,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            scale=UNUSUAL_SCALE * head_size**-0.5,
            window=70 if declares.window else 0,
            first_window_layer=1 if declares.window else 0,
        )
        few_layers = replace(spec, num_layers=layers_needed(spec))
        pool = new_pool(few_layers, pages_needed(page_size), page_size, getattr(torch, dtype), torch.device(device))
        require_same_bits(factory(spec, pool), spec, pool)


def through_hook(
    hook: Callable[[AttentionContext], AttentionFactory | None],
    options: Mapping[str, Any] | None = None,
    invariant: bool = False,
) -> AttentionFactory:
    """Return a factory that calls a plugin's hook with the context of a case, as an engine does at its start.

    invariant: whether results must be the same in every step."""

    def factory(spec: AttentionSpec, pool: KVPool) -> AttentionBackend:
        built = hook(
            AttentionContext(
                device=pool.data.device.type,
                dtype=str(pool.dtype).removeprefix("torch."),
                page_size=pool.page_size,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_size=spec.head_size,
                window=spec.window,
                kv_layout=pool.layout,
                kv_dtype=pool.format.kv_dtype,
                needs=spec.needs,
                invariant=invariant,
                options=dict(options or {}),
            )
        )
        assert built is not None, "the hook returned None"
        return built(spec, pool)

    return factory
