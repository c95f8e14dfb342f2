"""Decode steps through the seam: what each of them costs the host, what pads them, and that nothing is ever stale."""

import numpy as np
import pytest
import torch

from engine.execution.rows import DeviceRows
from engine.graphs import inputs as torch_inputs
from engine.graphs.capturing import Capturing
from engine.graphs.comm import COLLECTIVE, BreakingComm
from engine.graphs.decode import DecodeGraphs
from engine.graphs.device import HostDevice
from engine.layers.kv_pool import KVPool
from engine.layers.step import DecodeInputs
from engine.models.decoder import Decoder
from engine.plugins.comm.local import LocalComm
from engine.plugins.logits_processor.no_repeat_ngram import NoRepeatNgram
from engine.plugins.testing.threads import on_ranks
from engine.sampling.captured import SamplingVariant, columns_bytes, tensor_columns
from engine.sampling.processing import Processing
from engine.sampling.sampler import Sampler
from engine.text.processors import Processors
from engine.types.errors import GraphError
from tests.graphs.driver import KeepingRecorder, tensors_of
from tests.graphs.engines import install
from tests.graphs.recording import RecordingDevice, RecordingError
from tests.graphs.resident import ResidentTorchAttention
from tests.graphs.runners import GREEDY, MAX_LEN, PAGE_SIZE, OpenRunner, Steps, load, tokens
from tests.models.checkpoints import build, save
from tests.models.test_tensor_parallel import load_rank

RANDOM = GREEDY.replace(temperature=0.9, seed=5)
CUT = GREEDY.replace(temperature=0.9, seed=6, top_k=4, repetition_penalty=1.2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save(build("qwen3"), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def loaded(checkpoint):
    """(captured runner, plain runner, device); rows are taken anew by every test."""
    with pytest.MonkeyPatch.context() as patch:
        devices = install(patch)
        captured = load(checkpoint, "decode")
        return captured, load(checkpoint, "off"), devices[0]


@pytest.fixture
def both(loaded):
    """Does the same with both runners and compares what they sample."""
    captured, plain, device = loaded
    pairs = Steps(captured), Steps(plain)

    class Both:
        pass

    both = Both()
    both.device, both.parts = device, captured.parts

    def compared(name):
        def call(*args, **kwargs):
            got, expected = (tokens(getattr(one, name)(*args, **kwargs)) for one in pairs)
            assert got == expected
            return got

        return call

    both.prefill, both.decode, both.captured = compared("prefill"), compared("decode"), pairs[0]
    return both


def counts(device):
    """(copies to the device, copies from it, waits) since the last call."""
    seen = len(device.copies_in), len(device.copies_out), device.syncs
    device.copies_in.clear()
    device.copies_out.clear()
    device.syncs = 0
    return seen


def test_all_sizes_are_captured_once_with_a_sampler_for_each_variant_the_largest_first(loaded):
    captured, plain, device = loaded
    assert plain.parts.whole_decodes is None
    assert captured.parts.whole_decodes.sizes == captured.parts.whole_decodes.captured == (1, 2, 3, 4, 6, 8)
    descending = [size for size in (8, 8, 6, 4, 3, 2, 1) for _ in SamplingVariant]  # the largest once for nothing
    assert [graph.size for graph in device.graphs] == descending
    assert len(set(device.pools)) == 1
    bodies = [sum(one.func is torch.ops.aten.embedding.default for one in graph.operations) for graph in device.graphs]
    assert bodies == [1, 0, 0, 0, 0] * 7
    nodes = [len(graph.operations) for graph in device.graphs[-5:]]
    # Each variant used to hold all of it: 5 bodies and 4 samplers.
    assert 5 * nodes[0] + sum(nodes[1:]) > 2.5 * sum(nodes), nodes


def test_a_steady_step_copies_nothing_to_the_device_and_waits_for_nothing(both, monkeypatch):
    for row in range(3):
        both.prefill(row, 5)
    both.decode(0, 1, 2)  # the batch is new, and the sixth of eight places is filled
    counts(both.device)
    steps = both.captured
    steady = (0, 1, 0)
    with monkeypatch.context() as patch:
        # Besides the seam there is no way in: tensors from host values would be copies on a GPU.
        for name in ("from_numpy", "tensor", "as_tensor"):
            patch.setattr(torch, name, None)
        launched = []
        for _ in range(2):
            launched.append(steps.decode(0, 1, 2))
            assert counts(both.device) == steady
        launched.append(steps.decode(0, 1, 2))
        assert counts(both.device) == (1, 1, 0)  # pages were appended, one for each row: one packed copy
        for _ in range(3):
            launched.append(steps.decode(0, 1, 2))
            assert counts(both.device) == steady
    assert both.device.events
    tokens(launched[-1])
    assert both.device.syncs == 1  # only who reads the tokens waits


def test_who_joins_or_leaves_is_told_by_one_copy(both):
    for row in range(4):
        both.prefill(row, 5)
    both.decode(0, 1)
    counts(both.device)
    for rows in ((0, 1, 2), (0, 2), (2, 0), (3,)):
        both.captured.decode(*rows)
        assert counts(both.device) == (1, 1, 0), rows
    # Joins, and grows into a new page at once.
    both.captured.lengths[1] = len(both.captured.pages[1]) * PAGE_SIZE + 1
    both.captured.decode(3, 1)
    assert counts(both.device) == (1, 1, 0)


def test_a_row_that_is_admitted_elsewhere_costs_no_copy(both):
    for row in range(2):
        both.prefill(row, 5)
    both.decode(0, 1)
    both.prefill(2, 3, CUT)
    counts(both.device)
    both.decode(0, 1)
    assert counts(both.device)[0] == 0


def test_the_same_rows_with_other_sequences_are_another_batch(both):
    """Rows 0 and 1 again, but row 1 now draws: the parameters must be told although the list of rows is the same."""
    for row in range(2):
        both.prefill(row, 5)
    both.decode(0, 1)
    both.prefill(1, 9, RANDOM)
    counts(both.device)
    for _ in range(8):
        both.decode(0, 1)


@pytest.mark.parametrize("params", [GREEDY, RANDOM, CUT, GREEDY.replace(logprobs=1), GREEDY.replace(logit_bias={3: 9})])
def test_every_batch_size_gives_what_a_plain_runner_gives(both, params):
    """Up to more rows than any graph has; rows of other parameters and lengths between them."""
    for row in range(8):
        both.prefill(row, 3 + 2 * row, params if row % 2 else GREEDY.replace(temperature=row / 10, seed=row))
    for num in (1, 2, 3, 4, 5, 6, 7, 8, 5, 2):
        for _ in range(2):
            both.decode(*range(num))


def test_rows_that_asked_for_a_logits_processor_are_replayed_up_to_their_logits(both, loaded, monkeypatch):
    for parts in (runner.parts for runner in loaded[:2]):
        processing = Processing(Processors({"no_repeat_ngram": NoRepeatNgram()}), parts.rows.tokens_RM)
        monkeypatch.setattr(parts.sampler, "processing", processing)
    asked = GREEDY.replace(logits_processors={"no_repeat_ngram": {"size": 1}})
    both.prefill(0, 5, asked)
    both.prefill(1, 5)
    seen = [both.decode(0, 1) for _ in range(12)]
    assert len({first for first, _ in seen}) == 12, "each step sees what the step before has sampled"
    both.prefill(0, 5)
    both.decode(0, 1)
    assert both.parts.whole_decodes.variant_of(np.array([0, 1]), np.array([6, 19])) is SamplingVariant.GREEDY


def test_steps_with_prompts_come_between(both):
    for row in range(3):
        both.prefill(row, 4 + row, CUT)
        both.decode(*range(row + 1))
        both.decode(*range(row + 1))
    both.prefill(1, 20)
    both.decode(2, 0)
    both.decode(2, 0, 1)


def test_a_sequence_may_fill_its_row(both):
    both.prefill(0, MAX_LEN - 6)
    for _ in range(6):
        both.decode(0)


def test_results_are_kept_while_later_steps_are_queued(both):
    """Overlap: the next steps are launched before the tokens of this one are read."""
    for row in range(2):
        both.prefill(row, 5, RANDOM)
    expected = [both.decode(0, 1) for _ in range(7)]
    for row in range(2):
        both.prefill(row, 5, RANDOM)
    launched = [both.captured.decode(0, 1) for _ in range(7)]
    assert [tokens(one) for one in launched] == expected


def test_padding_touches_the_dump_page_and_no_row(both):
    for row in range(8):
        both.prefill(row, 5)
    both.decode(*range(8))
    rows, pool = both.parts.rows, both.parts.pool
    tables = dict(both.parts.attention.tables)  # where graphs of each size write theirs
    pages = [both.captured.pages[row][(both.captured.lengths[row] - 1) // pool.page_size] for row in (5, 6, 7, 2, 3)]
    pool.data[:, :, pages, (both.captured.lengths[5] - 1) % pool.page_size] = 1e3  # not what an earlier test left there
    before = [one.clone() for one in (rows.tokens_RM, rows.lengths_R, pool.data[:, :, : pool.num_pages])]
    both.decode(5, 6, 7, 2, 3)  # 5 rows in a graph of 6
    after = [one.clone() for one in (rows.tokens_RM, rows.lengths_R, pool.data[:, :, : pool.num_pages])]
    changed = [(old != new).sum().item() for old, new in zip(before, after, strict=True)]
    slots = 5 * pool.data.shape[0] * 2 * pool.data[0, 0, 0, 0].numel()
    assert changed[0] <= 5
    assert changed[1:] == [5, slots]
    assert tables[6][5].unique().tolist() == [pool.dump_page]


def test_a_row_whose_logits_are_not_finite_fails_alone(both):
    for row in range(3):
        both.prefill(row, 5)
    page = both.captured.pages[1][0]
    steps = both.captured
    kept = both.parts.pool.data.clone()
    both.parts.pool.data[:, :, page] = torch.nan
    got = tokens(steps.decode(0, 1, 2))
    both.parts.pool.data.copy_(kept)
    assert got[1] == -1
    assert min(got[0], got[2]) >= 0
    assert both.parts.rows.tokens_RM[1, steps.lengths[1] - 1] == 0


def test_static_memory_that_moves_is_noticed(loaded, monkeypatch):
    captured, _, device = loaded
    steps = Steps(captured)
    steps.prefill(0, 5)
    tokens(steps.decode(0))
    columns = tensor_columns(torch.zeros(columns_bytes(1), dtype=torch.uint8), 1)
    moved = captured.parts.sampler.captured(columns).static[-1]  # the table of token counts
    try:
        moved.set_(moved.clone())
        steps.prefill(0, 5, CUT)
        with pytest.raises(RecordingError, match="moved since the capture"):
            steps.decode(0)
    finally:
        for address, owner in list(device.statics.items()):
            if owner() is moved:
                del device.statics[address]


def test_larger_batches_run_as_they_are(checkpoint, monkeypatch):
    devices = install(monkeypatch)
    steps = Steps(load(checkpoint, "decode", max_rows=2))
    assert steps.runner.parts.whole_decodes.sizes == (1, 2)
    for row in range(3):
        steps.prefill(row, 5)
    devices[0].replays.clear()
    steps.decode(0, 1, 2)
    assert devices[0].replays == []
    steps.decode(0, 2)
    assert devices[0].replays == [2, 2]  # up to the logits, and the sampler


class Planned(ResidentTorchAttention):
    """A backend that is told the lengths before each replay; its kernels read what the step has written."""

    capturable = False

    def __init__(self, spec, pool):
        super().__init__(spec, pool)
        self.graphs = {}

    def for_graph(self, batch):
        graph = self.graphs[len(batch.host_lengths)] = PlannedGraph(self.spec, self.pool)
        super(PlannedGraph, graph).plan_step(batch)
        graph.seen = batch
        graph.begun = []
        return graph


class PlannedGraph(ResidentTorchAttention):
    def plan_step(self, batch):
        for name in ("page_table_BP", "lengths_B", "query_starts_B1"):
            assert getattr(batch, name) is getattr(self.seen, name), f"{name} has moved"
        self.begun.append(batch.host_lengths.tolist())


def test_attention_with_a_plan_is_planned_before_each_replay(checkpoint, monkeypatch):
    from engine.execution.attention import RankAttention

    install(monkeypatch)
    plain = Steps(load(checkpoint, "off"))
    monkeypatch.setattr(RankAttention, "build", lambda self, pool: Planned(self._spec, pool))
    steps = Steps(load(checkpoint, "decode", max_running=3))
    for one in (steps, plain):
        for row in range(3):
            one.prefill(row, 5 + row)
    for rows in ((0, 1, 2), (0, 1, 2), (2, 1), (0,), (0, 1, 2)):
        assert tokens(steps.decode(*rows)) == tokens(plain.decode(*rows))
    graphs = steps.runner.parts.attention.graphs
    assert graphs[3].begun[-3:] == [[6, 7, 8], [7, 8, 9], [9, 10, 11]]
    assert graphs[2].begun[-1] == [10, 9]


def test_lists_of_pages_are_made_in_front_of_the_embedding_and_never_beside_attention(checkpoint, monkeypatch):
    from engine.execution.attention import RankAttention

    launched = []

    def traced(name, work):
        return lambda *args, **kwargs: (launched.append(name), work(*args, **kwargs))[1]

    ops = torch_inputs.InputOps(traced("fill", torch_inputs.fill_inputs), torch_inputs.write_tokens)
    monkeypatch.setattr("engine.graphs.decode.choose_inputs", lambda device: ops)
    monkeypatch.setattr(Decoder, "_embed", traced("embed", Decoder._embed))
    monkeypatch.setattr(PlannedGraph, "begin_step", lambda self: launched.append("lists"), raising=False)
    monkeypatch.setattr(PlannedGraph, "attend", traced("attend", PlannedGraph.attend))
    install(monkeypatch)
    monkeypatch.setattr(RankAttention, "build", lambda self, pool: Planned(self._spec, pool))
    load(checkpoint, "decode", max_rows=1)
    steps = " ".join(launched).split("fill")[1:]
    assert steps
    assert {one.split()[0:3] == ["lists", "embed", "attend"] for one in steps} == {True}


def test_attention_that_cannot_be_captured_leaves_decode_steps_to_the_pieces(checkpoint, monkeypatch):
    devices = install(monkeypatch, resident=False)
    steps, plain = Steps(load(checkpoint, "breakable")), Steps(load(checkpoint, "off"))
    assert steps.runner.parts.whole_decodes is None
    for one in (steps, plain):
        for row in range(3):
            one.prefill(row, 5 + row)
    devices[0].replays.clear()
    assert tokens(steps.decode(0, 1, 2)) == tokens(plain.decode(0, 1, 2))
    assert set(devices[0].replays) == {4}


def test_a_failure_says_what_to_lower_and_auto_goes_on_without(checkpoint, monkeypatch, caplog):
    install(monkeypatch)

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(DecodeGraphs, "_run", fail)
    with pytest.raises(
        GraphError, match=r"out of memory.*graphs.max_rows \(now 8\), scheduler.max_running or kv.memory"
    ):
        load(checkpoint, "decode")
    steps = Steps(load(checkpoint, "auto"))
    assert "decode steps run without graphs" in caplog.text
    steps.prefill(0, 5)
    tokens(steps.decode(0))


class NoGrammars:
    """No row has one."""

    rows = ()

    def admit(self, *_):
        pass

    def begin(self, _):
        return None


def rank_runner(model, comm, device=None, recorder=None):
    """A rank's runner, captured if there is a device."""
    spec, cpu = model.attention_spec, torch.device("cpu")
    pool = KVPool(spec.num_layers, 40, PAGE_SIZE, spec.num_kv_heads, spec.head_size, model.dtype, cpu)
    attention, rows = ResidentTorchAttention(spec, pool), DeviceRows(4, MAX_LEN, PAGE_SIZE, cpu)
    sampler, graphs = Sampler(4, model.vocab_size, MAX_LEN, cpu), None
    if device is not None:
        graphs = DecodeGraphs(
            model=model,
            pool=pool,
            attention=attention,
            rows=rows,
            sampler=sampler,
            device=device,
            recorder=recorder,
            capturing=Capturing(device, comm, cpu),
            sizes=(2, 4),
        )
        device.register(*tensors_of([model, pool, rows, sampler, graphs]), attention.in_page)
        graphs.capture()
    return OpenRunner(
        comm=comm,
        graphs=device or HostDevice(),
        model=model,
        pool=pool,
        attention=attention,
        piecewise=None,
        whole_decodes=graphs,
        rows=rows,
        constraints=NoGrammars(),
        sampler=sampler,
        eos_token_ids=(),
    )


@pytest.mark.slow
def test_ranks_sample_the_same_tokens_together(cases):
    """Their collectives cannot be captured, so they break the graphs; padding does not travel."""
    case = cases["qwen3-yarn-bias"]

    def decoded(runner):
        steps = Steps(runner)
        for row in range(3):
            steps.prefill(row, 5 + row, CUT if row else GREEDY)
        return [tokens(steps.decode(*rows)) for rows in ((0, 1, 2), (0, 1, 2), (2,), (0, 1))]

    def work(comm):
        device = RecordingDevice()
        recorder = KeepingRecorder(device, device.pool())
        breaking = BreakingComm(comm, recorder)
        runner = rank_runner(load_rank(case.spec, breaking), breaking, device, recorder)
        # One for the embedding, two for each layer, and one for the logits.
        num_breaks = 2 + 2 * len(runner.parts.model.layers)
        assert [one.breaks for one in recorder.recordings] == [{COLLECTIVE: num_breaks}] * len(recorder.recordings)
        return decoded(runner)

    expected = decoded(rank_runner(case.model, LocalComm()))
    assert on_ranks(2, work) == [expected] * 2


def test_inputs_by_torch_pass_over_padding():
    tokens_RM = torch.arange(20, dtype=torch.int32).view(2, 10)
    pages_RP = torch.tensor([[7, 8, 0], [5, 6, 9]], dtype=torch.int32)
    lengths_R = torch.tensor([4, 9], dtype=torch.int32)
    columns = torch.full((4, 3), 99)
    inputs = DecodeInputs(*columns, torch.zeros(3, dtype=torch.int32), torch.full((3, 3), 99, dtype=torch.int32))
    own = torch.full((3,), -1)
    torch_inputs.fill_inputs(torch.tensor([1, -1, 0]), own, tokens_RM, pages_RP, lengths_R, 4, 12, inputs)
    assert columns.tolist() == [[19, 0, 4], [9, 0, 4], [9 * 4 + 1, 12 * 4, 8 * 4], [20, -1, 5]]
    assert inputs.lengths_B.tolist() == [10, 1, 5]
    assert inputs.page_table_BW.tolist() == [[5, 6, 9], [12, 12, 12], [7, 8, 0]]
    assert lengths_R.tolist() == [5, 10]
    torch_inputs.write_tokens(torch.tensor([5, -1, 3]), torch.tensor([42, 43, -1]), tokens_RM)
    assert tokens_RM[0].tolist() == [0, 1, 2, 0, 4, 42, 6, 7, 8, 9]
