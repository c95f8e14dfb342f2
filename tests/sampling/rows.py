"""Short ways to sample: one row alone, many draws of one distribution, the weights a row is drawn from."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.sampling.sampler import Sampler, candidate_weights
from engine.sampling.state import Newcomer, SamplingState, build_batch
from engine.types.params import SamplingParams

CPU = torch.device("cpu")
MAX_LEN = 4096
EOS = 0


def new_sampler(max_rows: int, vocab_size: int) -> Sampler:
    return Sampler(max_rows, vocab_size, MAX_LEN, CPU)


def admit(
    sampler: Sampler, row: int, params: SamplingParams, tokens: Sequence[int] = (1,), num_prompt: int = 1
) -> None:
    sampler.admit((Newcomer(row, params, np.array(tokens, dtype=np.int32), num_prompt),), (EOS,))


def sample_alone(params: SamplingParams, logits_V: Tensor, position: int = 1, tokens: Sequence[int] = (1,)) -> int:
    """The token of a sequence that has the engine to itself."""
    sampler = new_sampler(1, len(logits_V))
    admit(sampler, 0, params, tokens, len(tokens))
    return int(sampler.sample(logits_V[None], np.array([0]), np.array([position])).token_ids_N[0])


def draw_many(params: SamplingParams, logits_V: Tensor, num_draws: int) -> np.ndarray:
    """One draw for each of the seeds params.seed, params.seed + 1, ...: token ids."""
    sampler = new_sampler(num_draws, len(logits_V))
    for row in range(num_draws):
        admit(sampler, row, params.replace(seed=(params.seed or 0) + row))
    rows, positions = np.arange(num_draws), np.full(num_draws, 7)
    return sampler.sample(logits_V.expand(num_draws, -1), rows, positions).token_ids_N.numpy()


def probabilities(params: SamplingParams, logits_NV: Tensor) -> Tensor:
    """Return the distribution of each row under these parameters, normalised: float64 [N, V]."""
    num_rows, vocab_size = logits_NV.shape
    state = SamplingState(num_rows, vocab_size, MAX_LEN, CPU)
    for row in range(num_rows):
        state.admit((Newcomer(row, params, np.array([1], dtype=np.int32), 1),), (EOS,))
    batch = build_batch(state, np.arange(num_rows), np.zeros(num_rows, dtype=np.bool_))
    found = []
    for part in batch.parts:
        assert part.draws is not None
        assert isinstance(part.at, slice)
        _, weights_nW = candidate_weights(part.draws, logits_NV[part.at])
        found.append(weights_nW[:, :vocab_size].double())
    weights_NV = torch.cat(found)
    return weights_NV / weights_NV.sum(dim=-1, keepdim=True)


def chi_square_excess(token_ids: np.ndarray, expected_V: Tensor) -> float:
    """Return the distance of the chi-square statistic from its mean in standard deviations; rare tokens are pooled."""
    counts = np.bincount(token_ids, minlength=len(expected_V)).astype(np.float64)
    expected = expected_V.double().numpy() * len(token_ids)
    assert not counts[expected == 0].any(), "a token of probability zero was drawn"
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    degrees = max(1, len(expected) - 1)
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees))
