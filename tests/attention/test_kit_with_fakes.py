"""The plugins for compiled libraries through the kit that every attention backend goes through, over the stand-ins.

What the kit poisons (other sequences' pages, unused entries of the page table, slots past a sequence's end) shows here
whether lists, lengths and tables are right; whether a library's kernels are, shows on a GPU alone.
"""

from collections.abc import Iterator
from functools import partial

import msgspec
import pytest
import torch
from torch import Tensor

from engine.layers.attention import AttentionBackend, AttentionFactory, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.flash_attn.backend import FlashAttention
from engine.plugins.attention.flash_attn.kernels import FA2, FA3
from engine.plugins.attention.flash_attn.libraries import FA2_PAGE
from engine.plugins.attention.flash_mla import FlashMLAAttention
from engine.plugins.attention.flashinfer.backend import BUFFERS, FlashInferAttention
from engine.plugins.attention.flashinfer.kernels import Setup
from engine.plugins.attention.flashinfer.staging import StagingRing
from engine.plugins.attention.xqa import XQAAttention
from engine.plugins.declaration import read_declaration
from engine.plugins.manager import BUILTIN
from engine.plugins.proof.attention import check_case
from engine.plugins.proof.attention_cases import AttentionCase
from engine.plugins.support.paging import windows_of
from engine.plugins.testing.attention_cases import attention_cases
from tests.attention.fake_device import FakeStream
from tests.attention.fake_flash_attn import FakeFlashAttention
from tests.attention.fake_flash_mla import FakeFlashMLA
from tests.attention.fake_flashinfer import fake_flashinfer

NUM_SMS = 8


class AtOnce:
    """A backend over a fake stream, whose work is done when ``attend`` returns."""

    def __init__(self, backend: AttentionBackend, stream: FakeStream) -> None:
        self.plan_step = backend.plan_step
        self._backend = backend
        self._stream = stream

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        out_TNH = self._backend.attend(layer, q_TNH)
        self._stream.run()
        return out_TNH


def flashinfer(tensor_cores: bool, spec: AttentionSpec, pool: KVPool) -> AttentionBackend:
    stream, device = FakeStream(), torch.device("cpu")
    setup = Setup(
        library=fake_flashinfer(stream),
        spec=spec,
        pool=pool,
        workspace=torch.zeros(64, dtype=torch.uint8),
        plans=StagingRing(BUFFERS * 2 * len(windows_of(spec)), device, stream.event),
        tensor_cores=tensor_cores,
        num_sms=NUM_SMS,
    )
    lists = StagingRing(BUFFERS * 2, device, stream.event)
    return AtOnce(FlashInferAttention(setup, lists, "auto", ("prefill", "decode")), stream)


def fa2(spec: AttentionSpec, pool: KVPool) -> AttentionBackend:
    fake = FakeFlashAttention()
    return FlashAttention(spec, pool, FA2(spec, fake.fa2_with_kvcache, fake.fa2_varlen))


def fa3(spec: AttentionSpec, pool: KVPool) -> AttentionBackend:
    fake = FakeFlashAttention()
    return FlashAttention(spec, pool, FA3(spec, pool, NUM_SMS, fake.fa3_with_kvcache, fake.scheduler_metadata))


def fa3_invariant(spec: AttentionSpec, pool: KVPool) -> AttentionBackend:
    fake = FakeFlashAttention(fewest_queries=2)
    kernels = FA3(spec, pool, NUM_SMS, fake.fa3_with_kvcache, fake.scheduler_metadata, invariant=True)
    return FlashAttention(spec, pool, kernels, invariant=True)


def xqa(spec: AttentionSpec, pool: KVPool) -> AttentionBackend:
    stream = FakeStream()
    return AtOnce(XQAAttention(fake_flashinfer(stream), spec, pool), stream)


def flash_mla(spec: AttentionSpec, pool: KVPool) -> AttentionBackend:
    return FlashMLAAttention(FakeFlashMLA(), spec, pool)  # type: ignore[arg-type]


BACKENDS: dict[str, tuple[str, AttentionFactory, tuple[int, ...]]] = {
    "flashinfer": ("attention.flashinfer", partial(flashinfer, False), (1, 16, 64)),
    "flashinfer by tensor cores": ("attention.flashinfer", partial(flashinfer, True), (1, 16, 64)),
    "xqa": ("attention.xqa", xqa, (16, 64)),
    "flash_attn fa3": ("attention.flash_attn", fa3, (1, 16, 64)),
    "flash_attn fa3, invariant": ("attention.flash_attn", fa3_invariant, (16,)),
    "flash_attn fa2": ("attention.flash_attn", fa2, (FA2_PAGE,)),
    "flash_mla": ("attention.flash_mla", flash_mla, (64,)),
}
MAX_QUERIES = 300  # of a case with pages of 256 tokens: the stand-in computes one query at a time


def cases() -> Iterator[tuple[str, AttentionCase]]:
    for name, (plugin, _, page_sizes) in BACKENDS.items():
        declared = read_declaration(BUILTIN[plugin])
        assert declared is not None
        for case in attention_cases(msgspec.structs.replace(declared, page_sizes=page_sizes)):
            num_queries = sum(count for rows, segments in case.steps for _, count in (*rows, *segments))
            if name == "flash_attn fa2" and (case.latent_size or case.sinks):
                continue  # it refuses these at the start
            if case.page_size < FA2_PAGE or num_queries <= MAX_QUERIES:
                yield name, case


@pytest.mark.parametrize(("name", "case"), [pytest.param(*one, id=f"{one[0]}-{one[1]}") for one in cases()])
def test_case(name: str, case: AttentionCase) -> None:
    check_case(case, BACKENDS[name][1])


def test_every_backend_has_cases_of_decode_rows_and_of_prompts():
    for name in BACKENDS:
        steps = [step for one, case in cases() if one == name for step in case.steps]
        assert any(rows for rows, _ in steps), name
        assert any(segments for _, segments in steps) == (name not in ("xqa", "flash_mla")), name


def test_a_backend_for_latents_alone_has_no_other_cases():
    found = [case for name, case in cases() if name == "flash_mla"]
    assert {(case.head_size, case.latent_size) for case in found} == {(576, 512)}
    assert {case.name for case in found} == {"decode", "one row", "mixed", "padded decode"}
    assert {(case.head_size, case.latent_size) for name, case in cases() if name == "flash_attn fa3"} >= {
        (576, 512),
        (320, 256),
        (64, 0),
    }
