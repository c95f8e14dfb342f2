"""The triton backend through the kit that every attention backend goes through, in Triton's interpreter.

The kit's cases, made smaller: those with pages side by side are left to one, since no kernel can tell; mixed steps that
vary something else have one KV head; page-first pools are taken through single steps, of small pages; and what would
still take long is computed in float16, for which the kernels take larger tiles; pages in float8, whose numbers the
interpreter turns slowly, are taken through one step with everything in it.  ``attend`` is ``attend_into`` with
memory of its own, so that is compared in the one case with pages side by side, and not computed twice in all.
"""

from dataclasses import replace

import pytest

from engine.layers.attention import AttentionBackend, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.triton import callboard_attention_backend
from engine.plugins.declaration import read_declaration
from engine.plugins.proof.attention import check_case
from engine.plugins.proof.attention_cases import AttentionCase
from engine.plugins.testing.attention import through_hook
from engine.plugins.testing.attention_cases import attention_cases

LARGE = 400  # queries times heads


def cases() -> list[AttentionCase]:
    declares = read_declaration("engine.plugins.attention.triton")
    assert declares is not None
    cases = [case for case in attention_cases(declares) if case.name == "mixed" or not case.contiguous]
    cases = [case for case in cases if case.layout == "layer_first" or (len(case.steps) == 1 and case.page_size < 256)]
    cases = [in_one_step(case) if case.kv_dtype else case for case in cases if not case.kv_dtype or case.window]
    cases = [case if both_heads(case) else replace(case, num_kv_heads=1) for case in cases]
    cases = [replace(case, dtype="float16") if size(case) > LARGE or unusual(case) else case for case in cases]
    return list(dict.fromkeys(cases))


def in_one_step(case: AttentionCase) -> AttentionCase:
    return replace(case, name="mixed", steps=case.steps[:1], num_kv_heads=1, head_size=32)


def unusual(case: AttentionCase) -> bool:
    return bool(case.soft_cap or case.sinks or case.latent_size)


class Attending:
    """A triton backend without ``attend_into``."""

    capturable = True

    def __init__(self, attention: AttentionBackend) -> None:
        self.plan_step, self.attend = attention.plan_step, attention.attend


def attending(spec: AttentionSpec, pool: KVPool) -> AttentionBackend:
    return Attending(through_hook(callboard_attention_backend)(spec, pool))


def both_heads(case: AttentionCase) -> bool:
    return case.name != "mixed" or case.contiguous or case.strided


def size(case: AttentionCase) -> int:
    queries = sum(count for rows, segments in case.steps for _, count in (*rows, *segments))
    return queries * case.ratio * case.num_kv_heads


@pytest.mark.parametrize("case", cases(), ids=str)
def test_case(case: AttentionCase) -> None:
    check_case(case, through_hook(callboard_attention_backend) if case.contiguous else attending)
