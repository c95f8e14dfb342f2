"""The kernels of a small model on a CPU, next to what they replace."""

import logging
import shutil
import subprocess

import numpy as np
import pytest
import torch

from callboard import LLM, SamplingParams
from engine.kernels.choice import VARIABLE
from engine.kernels.cpu import CPUKernels, cpu_kernels
from engine.layers.attention import AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.layers.norm import HeadNorm, RMSNorm
from engine.layers.rotary import Rotary
from engine.plugins.attention.torch import TorchAttentionWithKernels
from engine.plugins.support.paging import batch_on

CPU = torch.device("cpu")
EPS = 1e-6

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture(autouse=True)
def anew(monkeypatch, tmp_path):
    """Nothing compiled yet, in this process or before it."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_kernels.cache_clear()
    yield
    cpu_kernels.cache_clear()


@pytest.fixture
def kernels() -> CPUKernels:
    found = cpu_kernels()
    assert found is not None
    return found


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 256), (5, 37), (3, 1), (0, 8)])
def test_the_sum_and_its_norm(kernels, num_tokens, size):
    norm = RMSNorm(size, EPS, CPU, torch.float32)
    norm.weight.normal_()
    x_TD, update_TD = torch.randn((2, num_tokens, size))
    expected_TD, sum_TD = norm.added(x_TD.clone(), update_TD, None), x_TD + update_TD
    found_TD = kernels.add_norm(x_TD, update_TD, norm.weight, EPS)
    torch.testing.assert_close(found_TD, expected_TD)
    torch.testing.assert_close(x_TD, sum_TD, rtol=0, atol=0)


def test_a_row_that_is_not_finite_reaches_no_other(kernels):
    x_TD, update_TD = torch.randn((2, 4, 64))
    x_TD[1, 3], x_TD[2, 5] = torch.nan, torch.inf
    found_TD = kernels.add_norm(x_TD, update_TD, torch.ones(64), EPS)
    assert found_TD[1:3].isfinite().all(-1).tolist() == [False, False]
    assert found_TD[[0, 3]].isfinite().all()


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("num_tokens", "scale"), [(1, 1.0), (6, 0.5)])
def test_heads_are_normed_turned_and_stored(kernels, normed, num_tokens, scale):
    num_queries, num_keys, size, num_slots = 4, 2, 64, 32
    rotary = Rotary(torch.rand(size // 2), scale, torch.float32)
    norm = HeadNorm(num_queries, num_keys, size, EPS, CPU, torch.float32)
    norm.weight.normal_()
    qkv_TAH = torch.randn((num_tokens, num_queries + 2 * num_keys, size))
    positions_T = torch.randint(2000, (num_tokens,))
    slots_T = torch.randperm(num_slots)[:num_tokens]
    keys_SGH, values_SGH = torch.zeros((2, num_slots, num_keys, size))

    rotated = num_queries + num_keys
    turned = qkv_TAH[:, :rotated]
    expected_TAH = rotary.rotate(norm(turned) if normed else turned, rotary.angles(positions_T))
    expected_keys, expected_values = keys_SGH.clone(), values_SGH.clone()
    expected_keys[slots_T], expected_values[slots_T] = expected_TAH[:, num_queries:], qkv_TAH[:, rotated:]

    (angles_TH,) = rotary.angles(positions_T, kernels)
    weight = norm.weight if normed else None
    q_TQH = kernels.rotate_and_store(qkv_TAH, weight, EPS, angles_TH, keys_SGH, values_SGH, slots_T)
    torch.testing.assert_close(q_TQH, expected_TAH[:, :num_queries])
    torch.testing.assert_close(keys_SGH, expected_keys)
    torch.testing.assert_close(values_SGH, expected_values, rtol=0, atol=0)


def test_a_slot_below_zero_stores_nothing_and_one_beyond_the_pool_is_refused(kernels):
    keys_SGH, values_SGH = torch.zeros((2, 8, 1, 4))
    qkv_TAH, angles_TH = torch.ones((2, 3, 4)), torch.ones((2, 4))
    kernels.rotate_and_store(qkv_TAH, None, 0.0, angles_TH, keys_SGH, values_SGH, torch.tensor([-1, 7]))
    assert values_SGH.sum((1, 2)).tolist() == [0.0] * 7 + [4.0]
    assert keys_SGH[:7].eq(0).all()
    with pytest.raises(IndexError, match="slot 8 of token 1"):
        kernels.rotate_and_store(qkv_TAH, None, 0.0, angles_TH, keys_SGH, values_SGH, torch.tensor([0, 8]))


class Rows:
    """Three decode rows of 5, 12 and 3 tokens, in pages of 4 of a pool of 8."""

    def __init__(self, kernels: CPUKernels) -> None:
        spec = AttentionSpec(num_layers=1, num_heads=4, num_kv_heads=2, head_size=64, scale=0.125)
        self.pool = KVPool(1, 8, 4, 2, 64, torch.float32, CPU)
        self.pool.data.normal_()
        self.backend = TorchAttentionWithKernels(kernels, spec, self.pool)
        self.table = np.array([[7, 2, 0], [1, 5, 3], [6, 0, 0]], dtype=np.int32)
        self.lengths = np.array([5, 12, 3], dtype=np.int32)
        self.q_BQH = torch.randn(3, 4, 64)

    def attend(self) -> torch.Tensor:
        self.backend.plan_step(batch_on(CPU, 3, self.table, self.lengths, np.ones(3, dtype=np.int32)))
        return self.backend.attend(0, self.q_BQH)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_key_that_is_not_finite_fails_its_row_alone(kernels, wrong):
    rows = Rows(kernels)
    before_BQH = rows.attend()
    rows.pool.keys(0)[3 * 4 + 1, 0, 0] = wrong  # of the second row, its tenth token, read by the heads of one group
    found_BQH = rows.attend()
    assert before_BQH.isfinite().all()
    torch.testing.assert_close(found_BQH[[0, 2]], before_BQH[[0, 2]], rtol=0, atol=0)
    failed = ~found_BQH[1].isfinite().all(-1)
    expected = rows.q_BQH[1, :, 0] > 0 if wrong == torch.inf else torch.tensor([True, True, False, False])
    assert failed.tolist() == (expected & torch.tensor([True, True, False, False])).tolist()


@pytest.mark.parametrize(("row", "page"), [(0, 9), (1, -1)])
def test_a_page_beyond_the_pool_is_refused(kernels, row, page):
    rows = Rows(kernels)
    rows.table[row, 1] = page
    with pytest.raises(IndexError, match=f"row {row} .* pool's 9"):
        rows.attend()


def test_a_row_longer_than_its_pages_is_refused_but_the_dump_page_may_be_read(kernels):
    rows = Rows(kernels)
    rows.table[2, 0] = rows.pool.dump_page
    assert rows.attend().isfinite().all()
    rows.lengths[1] = 13
    with pytest.raises(IndexError, match="row 1 is longer than its 3 pages"):
        rows.attend()


def test_a_model_writes_the_same_with_and_without(monkeypatch):
    calls, rows = [], []
    stored, attended = CPUKernels.rotate_and_store, CPUKernels.attend_decodes

    def counted(*arguments):
        calls.append(arguments)
        return stored(*arguments)

    def counted_too(*arguments):
        rows.append(arguments)
        attended(*arguments)

    def written() -> list[str]:
        config = {"device": {"threads": 1}}
        with LLM("examples/demo_model", config=config) as llm:
            prompts = ["What is a page?", "def f(", "import sys\n" * 20]
            return [one.text for one in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))]

    monkeypatch.setattr(CPUKernels, "rotate_and_store", counted)
    monkeypatch.setattr(CPUKernels, "attend_decodes", counted_too)
    with_kernels = written()
    assert len(calls) >= 24 * 5
    assert len(rows) >= 23 * 5
    calls.clear()
    rows.clear()
    monkeypatch.setenv(VARIABLE, "torch")
    cpu_kernels.cache_clear()
    assert written() == with_kernels
    assert not calls
    assert not rows


def test_the_second_start_compiles_nothing(monkeypatch, kernels):
    def compiled(*arguments, **options):
        raise AssertionError("compiled again")

    cpu_kernels.cache_clear()
    monkeypatch.setattr(subprocess, "run", compiled)
    assert cpu_kernels() is not None


def test_where_nothing_can_be_kept_it_is_compiled_at_each_start(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = cpu_kernels()
    assert found is not None
    assert found.add_norm(torch.ones(1, 4), torch.ones(1, 4), torch.ones(4), 0.0).tolist() == [[1.0] * 4]


def test_torch_does_the_work_where_there_is_no_compiler_and_where_it_fails(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("CC", "no-such-compiler")
    assert cpu_kernels() is None
    assert "there is no C compiler" in caplog.text
    monkeypatch.setenv("CC", "false")
    cpu_kernels.cache_clear()
    assert cpu_kernels() is None
    assert "cannot compile cpu.c" in caplog.text
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setenv(VARIABLE, "torch")
    cpu_kernels.cache_clear()
    assert cpu_kernels() is None
