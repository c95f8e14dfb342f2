"""The XQA plugin on a CPU: every list, offset and window that it hands over, to one that computes by them."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.plugins.attention import xqa as plugin
from engine.plugins.attention.xqa import XQAAttention, callboard_attention_backend
from engine.plugins.declaration import convert_declaration
from engine.plugins.hookspecs import AttentionContext
from engine.types.errors import PluginError
from tests.attention.fake_device import FakeStream
from tests.attention.fake_flashinfer import fake_flashinfer
from tests.attention.graph_rows import GraphRows
from tests.attention.test_flashinfer import grown, part_of
from tests.attention.test_torch_backend import Paged, paged, spec_of

ROWS = [(1, 1), (37, 1), (64, 1), (200, 1)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with FlashInfer and a Hopper GPU, as far as the hook looks."""
    machine = SimpleNamespace(stream=FakeStream(), capability=(9, 0))
    machine.library = fake_flashinfer(machine.stream)
    monkeypatch.setitem(sys.modules, "flashinfer", machine.library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: machine.capability)
    return machine


def context(**changes: object) -> AttentionContext:
    shape = {"page_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_size": 64, "phases": ("decode",)}
    return AttentionContext(**{"device": "cuda", "dtype": "bfloat16", **shape, **changes})


def check(case: Paged, backend: Any, stream: FakeStream, num_rows: int = 0) -> None:
    q_TNH = torch.cat((case.q_TNH, case.q_TNH.new_ones(max(0, num_rows - len(case.q_TNH)), *case.q_TNH.shape[1:])))
    with torch.inference_mode():
        backend.plan_step(case.batch)
        for layer in range(case.spec.num_layers):
            out_TNH = backend.attend(layer, q_TNH)[: len(case.q_TNH)]
            stream.run()
            assert (out_TNH.double() - case.expected(layer)).abs().max() <= 2e-6


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize(("window", "first_window_layer"), [(0, 0), (9, 1), (1, 0)])
def test_rows_of_every_length(gpu: Any, layout: str, window: int, first_window_layer: int):
    case = paged(spec_of(4, 2, 64, window, first_window_layer), ROWS, 16, seed=1, layout=layout)
    case.pool.data[:, :, case.pool.dump_page] = 0  # what it is tried out on
    backend = callboard_attention_backend(context())(case.spec, case.pool)
    gpu.stream.run()
    check(case, backend, gpu.stream)
    check(part_of(case, case.batch, 1, 3), backend, gpu.stream)


def test_captured_rows_follow_the_tables_and_lengths_of_each_step(gpu: Any):
    case = paged(spec_of(4, 2, 64, 30, 1), ROWS[1:], 16, seed=2)
    graph = GraphRows(XQAAttention(gpu.library, case.spec, case.pool), case.pool, num_rows=4, max_pages=13)
    assert not graph.plans, "a graph needs nothing of the host"
    for lengths in ([5, 6, 7], [16, 17, 200], [37, 64, 200]):
        check(grown(case, lengths), graph, gpu.stream, num_rows=4)


def test_a_table_that_is_part_of_a_wider_one_is_made_dense_where_a_graph_repeats_it(gpu: Any):
    case = paged(spec_of(4, 2, 64), ROWS[1:], 16, seed=3)
    attention = XQAAttention(gpu.library, case.spec, case.pool)
    wider = torch.cat((case.batch.page_table_BP, case.batch.page_table_BP.new_full((3, 5), -1)), 1)
    narrow = part_of(case, case.batch, 0, 3)
    narrow.batch = type(case.batch)(
        case.batch.num_decodes, wider[:, :-5], *(getattr(case.batch, name) for name in (
            "lengths_B", "query_starts_B1", "host_lengths", "host_query_lengths"
        ))
    )  # fmt: skip
    check(narrow, attention, gpu.stream)


def test_prompts_are_not_for_it(gpu: Any):
    declared = convert_declaration("engine.plugins.attention.xqa", plugin.CALLBOARD_PLUGIN)
    assert "it does not serve prefill" in declared.misfits(context(phases=("prefill", "decode")))
    case = paged(spec_of(4, 2, 64), [(30, 1), (33, 7)], 16, seed=4)
    with pytest.raises(AssertionError, match="1 of 2 decode"):
        XQAAttention(gpu.library, case.spec, case.pool).plan_step(case.batch)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"page_size": 8}, "page size 8, it takes 16, 32, 64, 128"),
        ({"head_size": 96}, "head size 96, it takes 64, 128, 256"),
        ({"num_heads": 64}, "ratio of query heads to KV heads 32, it takes multiples of 1 up to 16"),
        ({"dtype": "float32"}, "dtype float32, it takes bfloat16, float16"),
        ({"needs": ("sinks",)}, "the model needs attention sinks, which it does not do"),
    ],
)
def test_what_it_has_no_kernel_for_is_refused_by_name(gpu: Any, changes: dict[str, object], reason: str):
    declared = convert_declaration("engine.plugins.attention.xqa", plugin.CALLBOARD_PLUGIN)
    assert reason in declared.misfits(context(**changes))


def test_an_older_gpu_and_a_kernel_that_fails_are_named_before_the_start(gpu: Any):
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("nvcc is not found")

    gpu.library.decode.xqa_batch_decode_with_kv_cache = fails
    case = paged(spec_of(4, 2, 64), ROWS, 16, seed=5)
    with pytest.raises(PluginError, match=r"attention.xqa fails on a trial run \(RuntimeError: nvcc is not found\)"):
        callboard_attention_backend(context())(case.spec, case.pool)
    gpu.capability = (8, 9)
    with pytest.raises(PluginError, match=r"attention.xqa needs compute capability 9.0, this GPU has 8.9; set plugins"):
        callboard_attention_backend(context())
