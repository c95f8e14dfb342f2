"""The FlashInfer plugin on a CPU: every list, offset and window that it hands over, to one that computes by them."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.layers.attention import AttentionBackend, AttentionBatch
from engine.layers.kv_pool import KVPool
from engine.plugins.attention import flashinfer as plugin
from engine.plugins.attention.flashinfer import FlashInferOptions, callboard_attention_backend, choose_tensor_cores
from engine.plugins.attention.flashinfer.backend import BUFFERS, FlashInferAttention
from engine.plugins.attention.flashinfer.kernels import PagedAppend, Setup
from engine.plugins.attention.flashinfer.staging import StagingRing
from engine.plugins.declaration import convert_declaration
from engine.plugins.hookspecs import AttentionContext
from engine.types.errors import PluginError
from tests.attention.fake_device import FakeStream
from tests.attention.fake_flashinfer import fake_flashinfer
from tests.attention.graph_rows import GraphRows
from tests.attention.test_torch_backend import SEQUENCE, Paged, paged, spec_of

CPU = torch.device("cpu")
MIXED = [(1, 1), (37, 1), (64, 1), (20, 20), (33, 7), (50, 2)]
BOTH = ("prefill", "decode")


class Rig:
    """The backend on a fake GPU."""

    def __init__(self, case: Paged, tensor_cores: bool = False, prefill_backend: str = "auto") -> None:
        self.pool = case.pool
        self.stream = FakeStream()
        self.library = fake_flashinfer(self.stream)
        self.plans = StagingRing(BUFFERS * 4, CPU, self.stream.event)
        setup = Setup(
            library=self.library,
            spec=case.spec,
            pool=case.pool,
            workspace=torch.zeros(64, dtype=torch.uint8),
            plans=self.plans,
            tensor_cores=tensor_cores,
            num_sms=8,
        )
        lists = StagingRing(BUFFERS * 2, CPU, self.stream.event)
        self.backend = FlashInferAttention(setup, lists, prefill_backend, BOTH)

    def calls(self, name: str = "") -> list[str]:
        return [called for called, _ in self.library.calls if called.startswith(name)]

    def graph(self, num_rows: int, max_pages: int) -> GraphRows:
        """The backend in a graph of so many rows."""
        rows = GraphRows(self.backend, self.pool, num_rows, max_pages)
        self.stream.run()  # the first plan writes the lists as well, in front of the graph that makes them
        return rows

    def check(self, case: Paged, backend: AttentionBackend | None = None, num_rows: int = 0) -> None:
        """Run a step of ``case``, on a padded graph if num_rows is given, and compare it with the definition."""
        backend = backend or self.backend
        q_TNH = case.q_TNH
        if num_rows:
            q_TNH = torch.cat((q_TNH, q_TNH.new_ones(num_rows - len(q_TNH), *q_TNH.shape[1:])))
        with torch.inference_mode():
            backend.plan_step(case.batch)
            if num_rows:
                self.stream.run()  # a replay is queued behind its plan
            for layer in range(case.spec.num_layers):
                out_TNH = backend.attend(layer, q_TNH)
                self.stream.run()
                worst = (out_TNH[: len(case.q_TNH)].double() - case.expected(layer)).abs().max().item()
                assert worst <= 2e-6, f"layer {layer} differs by {worst}"


def without(rig: Rig, name: str) -> None:
    assert not rig.calls(name), rig.calls()


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("tensor_cores", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (10, 2)])
def test_mixed_ragged_batch(page_size: int, tensor_cores: bool, heads: tuple[int, int]):
    case = paged(spec_of(*heads, 16), MIXED, page_size, seed=1)
    Rig(case, tensor_cores).check(case)


@pytest.mark.parametrize("window", [1, 5, 16, 40])
@pytest.mark.parametrize("first_window_layer", [0, 1])
def test_sliding_window(window: int, first_window_layer: int):
    case = paged(spec_of(4, 2, 8, window, first_window_layer), MIXED, 4, seed=2)
    rig = Rig(case)
    rig.check(case)
    planned = {arguments["window_left"] for name, arguments in rig.library.calls if "plan" in name}
    assert planned == ({-1, window - 1} if first_window_layer else {window - 1})


def test_steps_of_decode_rows_alone_or_prompts_alone_use_one_kernel():
    rows = paged(spec_of(4, 2, 8), MIXED[:3], 4, seed=3)
    rig = Rig(rows)
    rig.check(rows)
    without(rig, "prefill")
    prompts = paged(spec_of(4, 2, 8), MIXED[3:], 4, seed=3)
    rig = Rig(prompts)
    rig.check(prompts)
    without(rig, "decode")


def test_one_step_after_another_of_any_kind():
    """Over one pool, whose pages change hands: nothing of a step may be left in the next one."""
    case = paged(spec_of(4, 2, 8), [(30, 1), (64, 1), (9, 1), (33, 7), (50, 2), (12, 12)], 4, seed=4)
    rig = Rig(case)
    everything = case.batch
    for first, last in ((0, 6), (0, 3), (3, 6), (1, 2), (2, 5), (0, 6), (4, 5)):
        rig.check(part_of(case, everything, first, last))


def part_of(case: Paged, batch: AttentionBatch, first: int, last: int) -> Paged:
    """Some of the sequences, as a step of their own."""
    starts = batch.query_starts_B1[first : last + 1]
    part = AttentionBatch(
        num_decodes=max(0, min(batch.num_decodes, last) - first),
        page_table_BP=batch.page_table_BP[first:last],
        lengths_B=batch.lengths_B[first:last],
        query_starts_B1=starts - starts[0],
        host_lengths=batch.host_lengths[first:last],
        host_query_lengths=batch.host_query_lengths[first:last],
    )
    q_TNH = case.q_TNH[int(starts[0]) : int(starts[-1])]
    return Paged(case.spec, case.pool, part, q_TNH, case.slots[first:last])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    sequences=st.lists(SEQUENCE, min_size=1, max_size=5),
    page_size=st.sampled_from([1, 4, 8]),
    window=st.sampled_from([0, 0, 3, 8, 64]),
    tensor_cores=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_batch(sequences: list[tuple[int, int]], page_size: int, window: int, tensor_cores: bool, seed: int):
    case = paged(spec_of(2, 1, 4, window), sequences, page_size, seed)
    Rig(case, tensor_cores).check(case)


def test_queries_that_are_a_slice_of_a_wider_tensor():
    case = paged(spec_of(4, 2, 8), [(9, 1), (21, 1), (12, 5)], 4, seed=5)
    wider = torch.randn(len(case.q_TNH), 8, 8)
    wider[:, :4] = case.q_TNH
    case.q_TNH = wider[:, :4]
    Rig(case).check(case)


def padded(case: Paged, num_padding: int) -> AttentionBatch:
    """The case's decode rows, and behind them rows of length 0 whose page table says page 0, which is NaN."""
    batch = case.batch
    count = len(batch.host_lengths)
    lengths = np.concatenate((batch.host_lengths, np.zeros(num_padding, dtype=np.int32)))
    table = torch.cat((batch.page_table_BP, batch.page_table_BP.new_zeros(num_padding, batch.page_table_BP.shape[1])))
    return AttentionBatch(
        num_decodes=count + num_padding,
        page_table_BP=table,
        lengths_B=torch.from_numpy(lengths),
        query_starts_B1=torch.arange(count + num_padding + 1, dtype=torch.int32),
        host_lengths=lengths,
        host_query_lengths=np.ones(count + num_padding, dtype=np.int32),
    )


def test_rows_of_length_0_read_the_dump_page_and_stay_finite():
    case = paged(spec_of(4, 2, 8), MIXED[:3], 4, seed=6)
    case.pool.data[:, :, case.pool.dump_page] = 0.5
    rig = Rig(case)
    rig.backend.plan_step(padded(case, 2))
    out = rig.backend.attend(0, torch.ones(5, 4, 8))
    rig.stream.run()
    assert torch.equal(out[3:], torch.full_like(out[3:], 0.5))


@pytest.mark.parametrize("tensor_cores", [True, False])
@pytest.mark.parametrize("window", [0, 9])
def test_a_captured_batch_of_fewer_rows_than_it_was_captured_for(tensor_cores: bool, window: int):
    spec = spec_of(4, 2, 8, window, 1)
    case = paged(spec, [(30, 1), (64, 1), (9, 1), (17, 1)], 4, seed=7)
    rig = Rig(case, tensor_cores)
    graph = rig.graph(4, 16)
    for first, last in ((0, 4), (0, 2), (1, 4), (3, 4), (0, 4)):
        rig.check(part_of(case, case.batch, first, last), graph, num_rows=4)


def test_rows_that_a_graph_is_not_given_read_the_dump_page_whatever_was_there_before():
    case = paged(spec_of(4, 2, 8), [(30, 1), (64, 1), (9, 1), (17, 1)], 4, seed=7)
    case.pool.data[:, :, case.pool.dump_page] = 0.5
    rig = Rig(case)
    graph = rig.graph(4, 32)
    for first, last in ((0, 4), (0, 2), (1, 4)):
        with torch.inference_mode():
            graph.plan_step(part_of(case, case.batch, first, last).batch)
            rig.stream.run()
            out = graph.attend(0, torch.ones(4, 4, 8))
            rig.stream.run()
        assert torch.equal(out[last - first :], torch.full_like(out[last - first :], 0.5))


def test_graphs_of_several_sizes_take_turns_over_one_list_of_pages():
    case = paged(spec_of(4, 2, 8), [(30, 1), (64, 1), (9, 1), (17, 1)], 4, seed=7)
    rig = Rig(case)
    graphs = {size: rig.graph(size, 16) for size in (4, 2, 1)}
    assert len({graph.backend._device_lists.pages_I1.data_ptr() for graph in graphs.values()}) == 1
    for size, first in ((4, 0), (2, 1), (1, 3), (2, 0), (4, 0), (1, 0), (2, 1)):
        rig.check(part_of(case, case.batch, first, first + size), graphs[size], num_rows=size)


def grown(case: Paged, lengths: list[int]) -> Paged:
    """The same sequences with other lengths, within the pages that they have."""
    host = np.array(lengths, dtype=np.int32)
    batch = case.batch
    new = AttentionBatch(
        batch.num_decodes,
        batch.page_table_BP,
        torch.from_numpy(host),
        batch.query_starts_B1,
        host,
        batch.host_query_lengths,
    )
    slots = [slots[:length] for slots, length in zip(case.slots, lengths, strict=True)]
    return Paged(case.spec, case.pool, new, case.q_TNH, slots)


def test_a_replay_plans_only_if_a_row_has_another_number_of_pages():
    case = paged(spec_of(4, 2, 8), [(32, 1), (32, 1)], 4, seed=8)
    rig = Rig(case)
    graph = rig.graph(2, 8)
    num_plans, planned = 1, (1, 1)  # at the capture
    # More steps than there are staging buffers, and rows that also become shorter, as others take their place.
    for length in (5, 6, 7, 8, 9, 10, 11, 3, 4, 5, 13, 14, 15, 16, 17, 9, 9, 9, 9, 9, 9, 9, 21):
        rig.check(grown(case, [length, length + 1]), graph, num_rows=2)
        pages = (-(-length // 4), -(-(length + 1) // 4))
        num_plans, planned = num_plans + (pages != planned), pages
        assert len(rig.calls("decode.plan") + rig.calls("decode.fast")) == num_plans, f"at length {length}"
    assert rig.calls("decode.plan") == ["decode.plan"], "after the first plan the fast one does"


def test_a_plan_that_failed_is_made_anew_also_for_the_rows_of_the_one_before(monkeypatch: pytest.MonkeyPatch):
    case = paged(spec_of(4, 2, 8), [(32, 1), (32, 1)], 4, seed=8)
    rig = Rig(case)
    graph = rig.graph(2, 8)
    rig.check(grown(case, [5, 6]), graph, num_rows=2)

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("planted")

    with monkeypatch.context() as patched:
        patched.setattr(rig.backend._setup.library.decode, "fast_decode_plan", full)
        with pytest.raises(torch.OutOfMemoryError):
            graph.plan_step(grown(case, [9, 10]).batch)
    rig.check(grown(case, [5, 6]), graph, num_rows=2)
    assert rig.calls("decode.plan") == ["decode.plan"] * 2


def test_a_replay_never_plans_again_once_the_rows_fill_the_gpu():
    """Without tensor cores nothing is split then, and the plan has nothing of the lengths in it."""
    case = paged(spec_of(4, 2, 8), [(32, 1)] * 6, 4, seed=9)
    for tensor_cores, num_plans in ((False, 1), (True, 3)):
        rig = Rig(case, tensor_cores)
        graph = rig.graph(6, 8)
        rig.check(grown(case, [5, 9, 13, 1, 32, 20]), graph, num_rows=6)
        rig.check(grown(case, [31, 2, 18, 30, 1, 4]), graph, num_rows=6)
        assert len(rig.calls("decode.plan") + rig.calls("decode.fast")) == num_plans


def test_what_a_graph_was_not_captured_for_is_refused():
    case = paged(spec_of(4, 2, 8), [(30, 1), (64, 1), (5, 5)], 4, seed=10)
    rig = Rig(case)
    with pytest.raises(AssertionError, match="3 rows, captured for 4"):
        rig.graph(4, 16).backend.plan_step(case.batch)
    rows = part_of(case, case.batch, 0, 2)
    with pytest.raises(AssertionError, match="16 pages of a row, captured for 4"):
        rig.graph(2, 4).backend.plan_step(rows.batch)


def test_a_graph_makes_its_lists_once_a_step_and_before_the_first_layer_where_it_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
):
    case = paged(spec_of(4, 2, 8), [(9, 1), (5, 1)], 4, seed=31)
    rig = Rig(case)
    graph = rig.graph(2, 4)
    made: list[str] = []
    monkeypatch.setattr(graph.backend._device_lists, "fill", lambda *tables: made.append("lists"))
    graph.plan_step(case.batch)
    rig.stream.run()
    q_TNH = case.q_TNH
    for layer in range(case.spec.num_layers):
        graph.attend(layer, q_TNH)
    assert made == ["lists"]
    graph.backend.attend(0, q_TNH)  # as in a trial, which has no step around it
    assert made == ["lists"] * 2


def test_prompts_go_to_fa3_if_they_fill_the_gpu_and_else_to_fa2():
    for queries, backend in ((2, "fa2"), (128, "fa2"), (129, "fa3"), (300, "fa3")):
        case = paged(spec_of(4, 2, 4), [(queries, queries)], 64, seed=11)
        rig = Rig(case)
        rig.check(case)
        assert rig.calls("prefill.plan") == [f"prefill.plan {backend}"], f"{queries} queries"
    many = paged(spec_of(4, 2, 4), [(4, 3)] * 2, 64, seed=11)
    rig = Rig(many)
    rig.check(many)
    assert rig.calls("prefill.plan") == ["prefill.plan fa3"], "two tiles of four heads, eight SMs"


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_a_prefill_kernel_that_was_named_serves_all_prompts(backend: str):
    case = paged(spec_of(4, 2, 4), [(300, 300), (3, 3)], 64, seed=12)
    for part in (case, part_of(case, case.batch, 1, 2)):
        rig = Rig(part, prefill_backend=backend)
        rig.check(part)
        assert set(rig.calls("prefill")) == {f"prefill.{what} {backend}" for what in ("plan", "run", "launch")}


def test_all_layers_of_a_step_share_the_arguments_that_the_first_one_put_together():
    spec = replace(spec_of(4, 2, 8), num_layers=5)
    case = paged(spec, [(30, 1), (64, 1), (33, 7), (50, 2)], 4, seed=22)
    rig = Rig(case)
    for step in range(3):  # each with a plan of its own
        part = case if step % 2 == 0 else part_of(case, case.batch, 1, 4)
        rig.library.calls.clear()
        rig.check(part)
        assert len(rig.calls("decode.run")) == len(rig.calls("prefill.run")) == 1
        assert len(rig.calls("decode.launch")) == len(rig.calls("prefill.launch")) == 5
    kept = [*rig.backend._decode[0]._kernel._arguments, *rig.backend._prefill[0]._kernel._arguments]
    assert not any(one is tensor for one in kept for pages in rig.backend._pages for tensor in pages)


def test_a_library_that_calls_its_kernels_in_another_way_is_asked_in_every_layer(monkeypatch: pytest.MonkeyPatch):
    """Two calls for a layer, or none that can be seen: nothing is bound, and every layer is right."""
    case = paged(spec_of(4, 2, 8), [(30, 1), (64, 1)], 4, seed=23)
    rig = Rig(case)
    run = rig.library.BatchDecodeWithPagedKVCacheWrapper.run

    def twice(self: Any, *args: Any, **kwargs: Any) -> None:
        run(self, *args, **kwargs)
        run(self, *args, **kwargs)

    def unseen(self: Any, *args: Any, **kwargs: Any) -> None:
        noting, self._cached_module = self._cached_module, SimpleNamespace(run=self._launch)
        run(self, *args, **kwargs)
        self._cached_module = noting

    for other in (twice, unseen):
        monkeypatch.setattr(rig.library.BatchDecodeWithPagedKVCacheWrapper, "run", other)
        rig.library.calls.clear()
        rig.check(case)
        assert len(rig.calls("decode.run")) == (4 if other is twice else 2)


def test_wrappers_are_built_for_the_phases_that_are_served():
    case = paged(spec_of(4, 2, 4), [(3, 3)], 4, seed=13)
    rig = Rig(case)
    alone = FlashInferAttention(rig.backend._setup, rig.backend._lists, "fa2", ("prefill",))
    rig.check(case, alone)
    assert not alone._decode
    assert not FlashInferAttention(rig.backend._setup, rig.backend._lists, "fa2", ("decode",))._prefill


# ---- storing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_keys_and_values_are_stored_where_the_pool_would_store_them(page_size: int):
    case = paged(spec_of(4, 2, 8), [(9, 1), (21, 1), (12, 5)], page_size, seed=14)
    stream, pool = FakeStream(), case.pool
    slots_T = torch.cat((torch.randperm(pool.num_pages * page_size)[:9], torch.tensor([pool.dump_page * page_size])))
    # Parts of a wider tensor, as they come from the merged projection.
    heads = torch.randn(10, 8, 8)
    k_TGH, v_TGH = heads[:, 4:6], heads[:, 6:]
    before = pool.data.clone()
    for layer in range(2):
        pool.store(layer, k_TGH, v_TGH, slots_T)
    expected = pool.data.clone()
    assert not torch.equal(expected.nan_to_num(), before.nan_to_num())
    pool.data.copy_(before)
    pool.store_by(PagedAppend(fake_flashinfer(stream), pool))
    for layer in range(2):
        pool.store(layer, k_TGH, v_TGH, slots_T)
    stream.run()
    assert torch.equal(pool.data.nan_to_num(), expected.nan_to_num())


# ---- the hook ------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with FlashInfer and a Hopper GPU, as far as the hook looks."""
    machine = SimpleNamespace(stream=FakeStream(), capability=(9, 0))
    machine.library = fake_flashinfer(machine.stream)
    monkeypatch.setitem(sys.modules, "flashinfer", machine.library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: machine.capability)
    properties = SimpleNamespace(multi_processor_count=6)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return machine


def context(**changes: object) -> AttentionContext:
    shape = {"page_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_size": 64}
    return AttentionContext(**{"device": "cuda", "dtype": "bfloat16", **shape, **changes})


def test_the_hook_gives_a_factory_that_tries_every_kernel_out(gpu: Any):
    case = paged(spec_of(4, 2, 64, 7, 1), MIXED, 16, seed=14)
    case.pool.data[:, :, case.pool.dump_page] = 0
    backend = callboard_attention_backend(context(window=7))(case.spec, case.pool)
    gpu.stream.run()
    called = {name for name, _ in gpu.library.calls}
    prefill = {f"prefill.{what} {kernel}" for what in ("plan", "run", "launch") for kernel in ("fa2", "fa3")}
    assert called == {"decode.plan", "decode.run", "decode.launch", "append"} | prefill
    assert {arguments["window_left"] for name, arguments in gpu.library.calls if "plan" in name} == {-1, 6}
    with torch.inference_mode():
        backend.plan_step(case.batch)
        out = backend.attend(1, case.q_TNH)
        gpu.stream.run()
    assert (out.double() - case.expected(1)).abs().max() <= 2e-6


def test_only_the_phases_that_are_served_are_tried_out(gpu: Any):
    case = paged(spec_of(4, 2, 64), [(3, 1)], 16, seed=15)
    case.pool.data[:, :, case.pool.dump_page] = 0
    callboard_attention_backend(context(phases=("decode",)))(case.spec, case.pool)
    assert {name for name, _ in gpu.library.calls} == {"decode.plan", "decode.run", "decode.launch", "append"}


def append_is_called(gpu: Any, pool: KVPool) -> bool:
    before = len(gpu.library.calls)
    nothing = torch.zeros(1, *pool.keys(0).shape[1:])
    pool.store(0, nothing, nothing, torch.tensor([pool.dump_page * pool.page_size]))
    return [name for name, _ in gpu.library.calls[before:]] == ["append"]


def test_the_library_stores_where_no_kernel_of_ours_does(gpu: Any, monkeypatch: pytest.MonkeyPatch):
    for kernels in (None, object()):
        monkeypatch.setattr(plugin, "choose_kernels", lambda device, kernels=kernels: kernels)
        case = paged(spec_of(4, 2, 64), [(3, 1)], 16, seed=19)
        callboard_attention_backend(context())(case.spec, case.pool)
        assert append_is_called(gpu, case.pool) == (kernels is None)


def test_pages_of_8_bits_are_read_by_fa2_and_written_by_the_pool(gpu: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plugin, "choose_kernels", lambda device: None)
    spec = spec_of(4, 2, 64)
    pool = KVPool(2, 12, 16, 2, 64, torch.bfloat16, torch.device("cpu"), kv_dtype="fp8_e4m3")
    callboard_attention_backend(context(kv_dtype="fp8_e4m3"))(spec, pool)
    gpu.stream.run()
    plans = [arguments for name, arguments in gpu.library.calls if "plan" in name]
    assert {name for name, _ in gpu.library.calls} == {
        *("decode.plan", "decode.run", "decode.launch"),
        *("prefill.plan fa2", "prefill.run fa2", "prefill.launch fa2"),
    }
    assert {(one["q_data_type"], one["kv_data_type"]) for one in plans} == {(torch.bfloat16, torch.float8_e4m3fn)}


def test_a_page_first_pool_is_written_by_torch_and_read_by_the_library(gpu: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plugin, "choose_kernels", lambda device: None)
    case = paged(spec_of(4, 2, 64), MIXED, 16, seed=24, layout="page_first")
    case.pool.data[:, :, case.pool.dump_page] = 0
    backend = callboard_attention_backend(context(kv_layout="page_first"))(case.spec, case.pool)
    assert not append_is_called(gpu, case.pool)
    with torch.inference_mode():
        backend.plan_step(case.batch)
        gpu.stream.run()
        out = backend.attend(1, case.q_TNH)
        gpu.stream.run()
    assert (out.double() - case.expected(1)).abs().max() <= 2e-6


def test_a_store_that_fails_at_start_is_a_plugin_error_and_leaves_the_pool_its_own(gpu: Any):
    def fails(**arguments: object) -> None:
        raise RuntimeError("no module page")

    gpu.library.append_paged_kv_cache = fails
    case = paged(spec_of(4, 2, 64), [(3, 1)], 16, seed=20)
    with pytest.raises(PluginError, match=r"trial run \(RuntimeError: no module page\); set plugins"):
        callboard_attention_backend(context())(case.spec, case.pool)
    case.pool.store(0, torch.zeros(1, 2, 64), torch.zeros(1, 2, 64), torch.tensor([0]))


def test_a_compiler_sees_torchs_own_store(gpu: Any, monkeypatch: pytest.MonkeyPatch):
    case = paged(spec_of(4, 2, 64), [(3, 1)], 16, seed=21)
    callboard_attention_backend(context())(case.spec, case.pool)
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    assert not append_is_called(gpu, case.pool)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"options": {"prefil_backend": "fa2"}}, "unknown field `prefil_backend`.*prefill_backend, tensor_cores"),
        ({"options": {"tensor_cores": "never"}, "num_heads": 10}, "this model has 5; set tensor_cores to 'auto'"),
        (
            {"options": {"prefill_backend": "fa3"}, "kv_dtype": "fp8_e4m3"},
            "does not read fp8_e4m3 pages.*'auto' or 'fa2'",
        ),
    ],
)
def test_what_it_cannot_do_is_a_plugin_error(gpu: Any, changes: dict[str, object], reason: str):
    with pytest.raises(PluginError, match=reason):
        callboard_attention_backend(context(**changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "device cpu, it takes cuda"),
        ({"dtype": "float32"}, "dtype float32, it takes bfloat16, float16"),
        ({"head_size": 80}, "head size 80, it takes 64, 128, 256"),
        ({"kv_dtype": "int8"}, "kv.dtype int8, it takes bfloat16, fp8_e4m3"),
    ],
)
def test_what_it_declares_keeps_it_from_being_asked(changes: dict[str, object], reason: str):
    assert reason in convert_declaration("flashinfer", plugin.CALLBOARD_PLUGIN).misfits(context(**changes))


def test_a_gpu_that_is_too_old_or_no_hopper_is_said_so(gpu: Any):
    gpu.capability = (7, 5)
    with pytest.raises(PluginError, match=r"needs compute capability 8\.0, this GPU has 7\.5"):
        callboard_attention_backend(context())
    gpu.capability = (8, 6)
    with pytest.raises(PluginError, match="for Hopper GPUs; set it to 'auto' or 'fa2'"):
        callboard_attention_backend(context(options={"prefill_backend": "fa3"}))
    case = paged(spec_of(4, 2, 64), [(3, 1)], 16, seed=16)
    case.pool.data[:, :, case.pool.dump_page] = 0
    callboard_attention_backend(context())(case.spec, case.pool)
    assert not [name for name, _ in gpu.library.calls if "fa3" in name]


def test_a_missing_package_is_named_with_its_extra(gpu: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(PluginError, match=r"flashinfer-python.*pip install 'callboard\[cuda\]', or set plugins"):
        callboard_attention_backend(context())


def test_a_kernel_that_fails_at_start_is_a_plugin_error_with_its_reason(gpu: Any, monkeypatch: pytest.MonkeyPatch):
    def run(self: object, *args: object, **kwargs: object) -> None:
        raise RuntimeError("no kernel image\n  is available")

    monkeypatch.setattr(gpu.library.BatchPrefillWithPagedKVCacheWrapper, "run", run)
    case = paged(spec_of(4, 2, 64), [(3, 1)], 16, seed=17)
    with pytest.raises(PluginError, match=r"trial run \(RuntimeError: no kernel image is available\); set plugins"):
        callboard_attention_backend(context())(case.spec, case.pool)


def test_a_version_that_keeps_its_plans_elsewhere_is_refused(gpu: Any, monkeypatch: pytest.MonkeyPatch):
    kind = gpu.library.BatchDecodeWithPagedKVCacheWrapper
    build = kind.__init__

    def renamed(self: Any, *args: object, **kwargs: object) -> None:
        build(self, *args, **kwargs)
        del self._pin_memory_int_workspace_buffer

    monkeypatch.setattr(kind, "__init__", renamed)
    case = paged(spec_of(4, 2, 64), [(3, 1)], 16, seed=18)
    with pytest.raises(PluginError, match=r"FlashInfer 0\.7\.fake keeps plans in other buffers"):
        callboard_attention_backend(context())(case.spec, case.pool)


@pytest.mark.parametrize(("group", "chosen"), [(1, False), (2, False), (3, False), (4, True), (5, True), (7, True)])
def test_tensor_cores_by_the_ratio_of_heads(group: int, chosen: bool):
    assert choose_tensor_cores(FlashInferOptions(), group) is chosen
    assert choose_tensor_cores(FlashInferOptions(tensor_cores="always"), group)


def test_options_have_the_documented_defaults():
    assert FlashInferOptions() == FlashInferOptions("auto", "auto", 128)
