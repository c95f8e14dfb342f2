"""A row's token is its own: not changed by its neighbours, by the row's last owner, or by broken logits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import engine.sampling.state as state_module
from engine.sampling.logprobs import batch_logprobs
from engine.sampling.state import Newcomer, SamplingState
from engine.types.params import SamplingParams
from tests.sampling.rows import CPU, EOS, MAX_LEN, admit, new_sampler, sample_alone

NAN, INF = float("nan"), float("inf")

params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.2, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 5, 40]),
    top_p=st.sampled_from([1.0, 0.9, 0.4]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5]),
    logit_bias=st.dictionaries(st.integers(0, 49), st.floats(-20, 20, width=16), max_size=3),
    min_tokens=st.sampled_from([0, 0, 2, 30]),
    max_tokens=st.just(100),
    seed=st.integers(0, (1 << 63) - 1),
    logprobs=st.sampled_from([None, None, 0, 5]),
    stop_token_ids=st.lists(st.integers(0, 49), max_size=2).map(tuple),
)


def some_logits(num_rows: int, vocab_size: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Coarse values, so that ties are common."""
    logits = torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(seed)) * 3
    return ((logits * 4).round() / 4).to(dtype)


@settings(deadline=None, max_examples=80)
@given(
    data=st.data(),
    every=st.lists(params_strategy, min_size=1, max_size=16),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    vocab_size=st.sampled_from([50, 600]),
    rows_per_part=st.sampled_from([1, 3, 1000]),
)
def test_a_row_alone_and_in_any_batch_gets_the_same_token(data, every, seed, dtype, vocab_size, rows_per_part):
    num = len(every)
    logits_NV = some_logits(num, vocab_size, seed, dtype)
    positions = np.random.default_rng(seed).integers(3, 40, num)
    alone = [sample_alone(params, logits_NV[i], int(positions[i]), tokens=[1, 2, 2]) for i, params in enumerate(every)]
    rows = np.random.default_rng(seed + 1).permutation(20)[:num]
    batch_order = np.array(data.draw(st.permutations(range(num))), dtype=np.int64)
    sampler = new_sampler(20, vocab_size)
    for i, params in enumerate(every):
        admit(sampler, int(rows[i]), params, [1, 2, 2], 3)
    patch = pytest.MonkeyPatch()
    patch.setattr(state_module, "PART_SCORES_CPU", rows_per_part * vocab_size)
    with patch.context():
        sampled = sampler.sample(logits_NV[batch_order], rows[batch_order], positions[batch_order])
    patch.undo()
    assert sampled.token_ids_N.tolist() == [alone[i] for i in batch_order]


def test_large_vocabulary_rows_are_the_same_alone_and_together():
    logits_NV = some_logits(6, 40_000, 1)
    every = [SamplingParams(seed=i, temperature=0.5 + i, top_p=1.0 if i % 2 else 0.95) for i in range(6)]
    sampler = new_sampler(6, 40_000)
    for row, params in enumerate(every):
        admit(sampler, row, params)
    for position in range(1, 15):
        together = sampler.sample(logits_NV, np.arange(6), np.full(6, position)).token_ids_N.tolist()
        assert together == [sample_alone(params, logits_NV[i], position) for i, params in enumerate(every)]


@settings(deadline=None, max_examples=100)
@given(first=params_strategy, second=params_strategy)
def test_a_reused_row_keeps_nothing_of_its_last_owner(first, second):
    used, fresh = (SamplingState(2, 50, MAX_LEN, CPU) for _ in range(2))
    used.admit((Newcomer(1, first, np.array([4, 4, 9, 9], dtype=np.int32), 2),), (EOS,))
    for state in (used, fresh):
        state.admit((Newcomer(1, second, np.array([1, 2, 3], dtype=np.int32), 2),), (EOS, 5))
    for name, value in vars(fresh).items():
        left = getattr(used, name)
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(left, value, err_msg=name)
        elif name == "bias":
            assert [array.tolist() for array in left[1]] == [array.tolist() for array in value[1]]
        elif name == "stop_ids":
            assert left[1].tolist() == value[1].tolist()
    if fresh.penalised[1]:
        counts = [state.counts.read(torch.from_numpy(state.counts.lines(np.array([1]))))[0] for state in (used, fresh)]
        assert torch.equal(counts[0], counts[1])
    else:
        assert not used.counts._line_of_row


def test_a_row_readmitted_between_two_equal_batches_samples_by_its_new_parameters():
    logits_NV = torch.tensor([[0.0, 5.0, 1.0]])
    sampler = new_sampler(1, 3)
    admit(sampler, 0, SamplingParams(temperature=0.0))
    assert sampler.sample(logits_NV, np.array([0]), np.array([1])).token_ids_N.tolist() == [1]
    admit(sampler, 0, SamplingParams(temperature=0.0, logit_bias={2: 50.0}))
    assert sampler.sample(logits_NV, np.array([0]), np.array([1])).token_ids_N.tolist() == [2]


BROKEN = {
    "one nan": lambda row: row.index_fill(0, torch.tensor([17]), NAN),
    "all nan": lambda row: row * NAN,
    "one inf": lambda row: row.index_fill(0, torch.tensor([17]), INF),
    "all inf": lambda row: torch.full_like(row, INF),
    "all -inf": lambda row: torch.full_like(row, -INF),
    "nan and inf": lambda row: row.index_fill(0, torch.tensor([3]), NAN).index_fill(0, torch.tensor([4]), INF),
    "nan among -inf": lambda row: torch.full_like(row, -INF).index_fill(0, torch.tensor([49]), NAN),
}
FEATURES = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(seed=1),
    "top_k": SamplingParams(seed=1, top_k=5),
    "top_p": SamplingParams(seed=1, top_p=0.8),
    "top_k and top_p": SamplingParams(seed=1, top_k=5, top_p=0.8, min_p=0.01),
    "greedy penalty": SamplingParams(temperature=0.0, repetition_penalty=1.5, frequency_penalty=1.0),
    "bias": SamplingParams(seed=1, logit_bias={17: 5.0}),
    "min_tokens": SamplingParams(seed=1, min_tokens=9, logprobs=2),
}


@pytest.mark.reliability("U4", "logits of NaN, infinities, zeros, with every sampling parameter")
@pytest.mark.parametrize("broken", BROKEN)
def test_broken_logits_fail_their_own_row_alone(broken):
    """Every second row is broken; the others must be as in a batch without them."""
    num = 2 * len(FEATURES)
    every = [params for params in FEATURES.values() for _ in range(2)]
    healthy_NV = some_logits(num, 50, 4)
    mixed_NV = healthy_NV.clone()
    for index in range(1, num, 2):
        mixed_NV[index] = BROKEN[broken](healthy_NV[index])
    found = []
    for logits_NV in (healthy_NV, mixed_NV):
        sampler = new_sampler(num, 50)
        for row, params in enumerate(every):
            admit(sampler, row, params)
        steps = [sampler.sample(logits_NV, np.arange(num), np.full(num, position)) for position in (1, 2, 3)]
        found.append(torch.stack([step.token_ids_N for step in steps]))
    assert torch.equal(found[0][:, ::2], found[1][:, ::2])
    assert (found[0] >= 0).all()
    assert (found[1][:, 1::2] == -1).all()


@pytest.mark.reliability("U4", "logits of NaN, infinities, zeros, with every sampling parameter")
@pytest.mark.parametrize("params", FEATURES.values(), ids=FEATURES)
def test_logits_of_zero_are_no_failure(params):
    tokens = {sample_alone(params, torch.zeros(50), position) for position in range(1, 60)}
    assert tokens <= set(range(50))
    assert (len(tokens) == 1) == (params.temperature == 0 or params.top_k == 1), "which of equals is drawn"


@pytest.mark.reliability("U4", "logits of NaN, infinities, zeros, with every sampling parameter")
@pytest.mark.parametrize("params", FEATURES.values(), ids=FEATURES)
def test_logits_of_minus_infinity_are_never_drawn_and_are_no_failure(params):
    logits_V = torch.full((50,), -INF)
    logits_V[20:23] = torch.tensor([1.0, 1.5, 1.2])
    params = params.replace(logit_bias={})
    found = {sample_alone(params, logits_V, position) for position in range(1, 60)}
    assert found <= {20, 21, 22}


def test_a_row_that_allows_only_eos_ends_instead_of_failing():
    logits_V = torch.full((50,), -INF)
    logits_V[EOS] = 0.0
    assert sample_alone(SamplingParams(seed=1, min_tokens=9), logits_V) == EOS


@pytest.mark.parametrize("params", FEATURES.values(), ids=FEATURES)
def test_all_zero_logits_give_some_token(params):
    assert 0 <= sample_alone(params, torch.zeros(50)) < 50


def test_logits_are_left_as_they_are():
    logits_NV = some_logits(3, 50, 2)
    before = logits_NV.clone()
    sampler = new_sampler(3, 50)
    params = SamplingParams(seed=1, logit_bias={1: 3.0}, repetition_penalty=2.0, top_p=0.5, min_tokens=4)
    for row in range(3):
        admit(sampler, row, params)
    sampler.sample(logits_NV, np.arange(3), np.full(3, 2))
    assert torch.equal(logits_NV, before)


def test_a_step_without_samples_is_fine():
    nothing = np.empty(0, dtype=np.int64)
    assert new_sampler(1, 5).sample(torch.empty(0, 5), nothing, nothing).token_ids_N.shape == (0,)


class Operators(TorchDispatchMode):
    """Records the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        if func.overloadpacket.__name__ in ("index", "index_put", "index_put_"):
            assert all(index is None or index.dtype is not torch.bool for index in args[1]), "a mask as index waits"
        return func(*args, **(kwargs or {}))


def test_sampling_never_asks_the_device_for_a_value():
    """A wait for a CUDA device is one of these operators on any device."""
    sampler = new_sampler(len(FEATURES), 50)
    for row, params in enumerate(FEATURES.values()):
        admit(sampler, row, params)
    rows = np.arange(len(FEATURES))
    with Operators() as operators:
        sampler.sample(some_logits(len(FEATURES), 50, 1), rows, np.full(len(rows), 3))
    waiting = {"_local_scalar_dense", "item", "nonzero", "masked_select", "_unique2", "equal", "repeat_interleave"}
    assert not waiting & set(operators.names)


def test_a_greedy_batch_costs_one_pass_over_the_logits():
    sampler = new_sampler(4, 50)
    for row in range(4):
        admit(sampler, row, SamplingParams(temperature=0.0, top_k=3, top_p=0.5, seed=row))
    rows = np.arange(4)
    sampler.sample(some_logits(4, 50, 1), rows, np.full(4, 3))
    with Operators() as operators:
        sampler.sample(some_logits(4, 50, 1), rows, np.full(4, 4))
    over_logits = {"max", "amax", "argmax", "sub", "exp", "exp_", "topk", "index_select", "_to_copy", "_log_softmax"}
    assert [name for name in operators.names if name in over_logits] == ["max"]


def test_a_steady_batch_is_built_once(monkeypatch):
    built = []
    original = state_module.build_batch
    monkeypatch.setattr("engine.sampling.sampler.build_batch", lambda *args: built.append(1) or original(*args))
    sampler = new_sampler(4, 50)
    for row in range(4):
        admit(sampler, row, SamplingParams(seed=row, top_p=0.9, min_tokens=2))
    for position in range(1, 10):
        sampler.sample(some_logits(4, 50, position), np.arange(4), np.full(4, position))
    assert len(built) == 2  # once with EOS held off, once without


def test_log_probabilities_of_an_odd_vocabulary_are_summed_over_aligned_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU begins a row's sum where its memory does, so a row that begins elsewhere would have bits of its place."""
    widths = []
    softmax = torch.log_softmax

    def watched(logits: torch.Tensor, **options: object) -> torch.Tensor:
        widths.append(logits.shape[1])
        return softmax(logits, **options)

    monkeypatch.setattr(torch, "log_softmax", watched)
    for vocab_size in (48, 53):
        logits_NV = torch.randn((3, vocab_size), generator=torch.Generator().manual_seed(1))
        found = batch_logprobs(logits_NV, torch.tensor([0, 5, vocab_size - 1]), np.array([0, 2]), np.array([2, 2]))
        expected_LV = softmax(logits_NV[[0, 2]], dim=-1)
        assert torch.allclose(found.chosen_L, expected_LV[[0, 1], [0, vocab_size - 1]])
        assert torch.equal(found.top_ids_LK.long(), expected_LV.topk(20).indices)
    assert widths == [48, 56]
