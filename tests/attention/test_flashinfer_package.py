"""The plugin over FlashInfer's own Python, all but the compiled kernels: what reaches those is right as well.

Importing FlashInfer needs no GPU; ``make signatures`` installs what it takes beside the virtual environment.
"""

from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.plugins.attention.flashinfer.backend import BUFFERS, FlashInferAttention
from engine.plugins.attention.flashinfer.kernels import GRAPH_PLAN_BYTES, PLAN_BYTES, Setup
from engine.plugins.attention.flashinfer.staging import StagingRing
from tests.attention.fake_flashinfer import MAX_GRID, attend
from tests.attention.graph_rows import GraphRows
from tests.attention.test_flashinfer import MIXED, grown, part_of
from tests.attention.test_torch_backend import Paged, paged, spec_of

if find_spec("flashinfer") is None:
    pytest.skip("FlashInfer is not installed", allow_module_level=True)
flashinfer = import_module("flashinfer")

CPU = torch.device("cpu")
NON_CAUSAL, CAUSAL, NHD, NO_LSE = 0, 1, 0, None


class Kernels:
    """The compiled modules: their plans are written down, and their kernels compute by the arguments they get."""

    def __init__(self) -> None:
        self.plans: list[str] = []

    def decode(self, *key: Any) -> SimpleNamespace:
        return SimpleNamespace(plan=self.plan_decode, run=self.run_decode, workspace_size=None)

    def prefill(self, backend: str, *key: Any) -> SimpleNamespace:
        return SimpleNamespace(plan=getattr(self, f"plan_{backend}"), paged_run=self.run_prefill)

    def _note(self, name: str, int_workspace: Tensor, staging: Tensor, numbers: Tensor) -> None:
        self.plans.append(name)
        assert len(staging) == PLAN_BYTES >= len(int_workspace)
        numbers = torch.cat((torch.tensor([len(numbers)]), numbers)).to(torch.int32)
        staging[: 4 * len(numbers)].view(torch.int32).copy_(numbers)
        int_workspace[: 4 * len(numbers)].copy_(staging[: 4 * len(numbers)])

    def plan_decode(
        self, workspace: Tensor, int_workspace: Tensor, staging: Tensor, starts: Tensor, num_rows: int, num_heads: int,
        num_kv_heads: int, page_size: int, graph: bool, window_left: int, soft_cap: float, head_size: int,
        value_size: int, query: Tensor, key: Tensor,
    ) -> list[int]:  # fmt: skip
        splits = num_rows * num_kv_heads < MAX_GRID
        assert (len(int_workspace) == GRAPH_PLAN_BYTES) is graph
        self._note("decode", int_workspace, staging, starts.diff() if splits else torch.tensor([num_rows]))
        return [num_rows, 0, 0, 0, 0, 0, 0, 0, int(graph), int(splits)]

    def plan_fa2(
        self, workspace: Tensor, int_workspace: Tensor, staging: Tensor, query_starts: Tensor, starts: Tensor,
        lengths: Tensor, num_tokens: int, num_rows: int, num_heads: int, num_kv_heads: int, page_size: int,
        graph: bool, head_size: int, value_size: int, causal: bool, window_left: int, split_size: int,
        no_split: bool, colocated: int, uniform: int,
    ) -> list[int]:  # fmt: skip
        assert num_tokens == query_starts[-1]
        self._note("fa2", int_workspace, staging, torch.cat((starts.diff(), query_starts.diff())))
        return [0] * 15

    def plan_fa3(
        self, workspace: Tensor, int_workspace: Tensor, staging: Tensor, query_starts: Tensor, starts: Tensor,
        lengths: Tensor, num_tokens: int, num_rows: int, num_heads: int, num_kv_heads: int, page_size: int,
        graph: bool, head_size: int, value_size: int, causal: bool, window_left: int,
    ) -> list[int]:  # fmt: skip
        assert torch.equal(-(-lengths // page_size), starts.diff())
        self._note("fa3", int_workspace, staging, torch.cat((starts.diff(), query_starts.diff())))
        return [0] * 9

    def run_decode(self, workspace: Tensor, int_workspace: Tensor, plan: list[int], *args: Any) -> None:
        q, keys, values, starts, pages, last, out, lse, layout, window_left, _, _, soft_cap, scale = args[:14]
        planned = int_workspace.view(torch.int32)
        numbers = planned[1 : 1 + int(planned[0])]
        assert torch.equal(numbers, starts.diff() if plan[9] else torch.tensor([len(last)], dtype=torch.int32))
        assert (lse, layout, soft_cap) == (NO_LSE, NHD, 0)
        ones = torch.arange(len(last) + 1)
        self._compute(q, keys, values, ones, starts, pages, last, out, window_left, scale)

    def run_prefill(self, workspace: Tensor, int_workspace: Tensor, plan: list[int], *args: Any) -> None:
        q, keys, values, query_starts, starts, pages, last, out, lse, mask, layout, window_left = args[:12]
        planned = int_workspace.view(torch.int32)
        assert torch.equal(planned[1 : 1 + int(planned[0])], torch.cat((starts.diff(), query_starts.diff())))
        assert (lse, layout) == (NO_LSE, NHD)
        # A single query sees everything either way.
        assert mask == CAUSAL or (mask == NON_CAUSAL and (query_starts.diff() == 1).all())
        soft_cap, scale = args[19:21]
        assert soft_cap == 0
        self._compute(q, keys, values, query_starts, starts, pages, last, out, window_left, scale)

    def _compute(
        self, q: Tensor, keys: Tensor, values: Tensor, query_starts: Tensor, starts: Tensor, pages: Tensor,
        last: Tensor, out: Tensor, window_left: int, scale: float,
    ) -> None:  # fmt: skip
        for row, count in enumerate(starts.diff().tolist()):
            own = pages[starts[row] : starts[row] + count].long()
            length = (count - 1) * keys.shape[1] + int(last[row])
            own_keys, own_values = (x[own].flatten(0, 1)[:length] for x in (keys, values))
            first, end = query_starts[row : row + 2].tolist()
            for place in range(first, end):
                stop = length - (end - place) + 1
                begin = max(0, stop - 1 - window_left) if window_left >= 0 else 0
                out[place] = attend(q[place], own_keys[begin:stop], own_values[begin:stop], scale)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    fake, empty = Kernels(), torch.empty

    def unlocked(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", unlocked)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(flashinfer.decode, "get_batch_decode_module", fake.decode)
    monkeypatch.setattr(flashinfer.decode, "get_batch_prefill_module", fake.prefill)
    monkeypatch.setattr(flashinfer.prefill, "get_batch_prefill_module", fake.prefill)
    return fake


def build(case: Paged, tensor_cores: bool) -> FlashInferAttention:
    setup = Setup(
        library=flashinfer,
        spec=case.spec,
        pool=case.pool,
        workspace=torch.zeros(1 << 10, dtype=torch.uint8),
        plans=StagingRing(BUFFERS * 2, CPU),
        tensor_cores=tensor_cores,
        num_sms=8,
    )
    return FlashInferAttention(setup, StagingRing(BUFFERS, CPU), "auto", ("prefill", "decode"))


def check(case: Paged, backend: Any, num_rows: int = 0) -> None:
    q_TNH = torch.cat((case.q_TNH, case.q_TNH.new_ones(max(0, num_rows - len(case.q_TNH)), *case.q_TNH.shape[1:])))
    with torch.inference_mode():
        backend.plan_step(case.batch)
        for layer in range(case.spec.num_layers):
            out_TNH = backend.attend(layer, q_TNH)[: len(case.q_TNH)]
            assert (out_TNH.double() - case.expected(layer)).abs().max() <= 2e-6


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize(("window", "first_window_layer"), [(0, 0), (9, 1), (1, 0)])
def test_steps_of_every_kind(kernels: Kernels, tensor_cores: bool, window: int, first_window_layer: int):
    case = paged(spec_of(4, 2, 64, window, first_window_layer), [*MIXED, (150, 140)], 16, seed=1)
    backend = build(case, tensor_cores)
    for first, last in ((0, 7), (0, 3), (3, 7), (1, 4), (6, 7)):
        check(part_of(case, case.batch, first, last), backend)
    assert set(kernels.plans) == {"fa2", "fa3"} | ({"decode"} if not tensor_cores else set())


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("num_rows", [3, 8])
def test_captured_rows(kernels: Kernels, tensor_cores: bool, num_rows: int):
    case = paged(spec_of(4, 2, 64, 9, 1), [(30, 1), (64, 1), (17, 1)], 4, seed=2)
    graph = GraphRows(build(case, tensor_cores), case.pool, num_rows, 20)
    for lengths, num_plans in (([5, 6, 7], 2), ([6, 7, 8], 2), ([7, 8, 9], 3), ([30, 64, 17], 4)):  # 1 at the capture
        check(grown(case, lengths), graph, num_rows)
        # One plan for each window; eight rows of two heads fill the GPU, and without tensor cores one is then enough.
        assert len(kernels.plans) == 2 * (num_plans if tensor_cores or num_rows == 3 else 1), f"at {lengths}"
    check(part_of(case, case.batch, 1, 2), graph, num_rows)
