"""Batches of one shape are sampled as any other batch, in the cheapest variant that serves them."""

import numpy as np
import pytest
import torch

from engine.sampling.captured import NO_ROW, SamplingVariant, array_columns, columns_bytes, tensor_columns
from engine.sampling.sampler import Sampler
from engine.sampling.state import Newcomer
from engine.types.params import SamplingParams

CPU = torch.device("cpu")
VOCAB, ROWS = 700, 6
GREEDY = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=0.8, seed=3)
CUT = SamplingParams(seed=4, top_k=9, top_p=0.8, min_p=0.02)
PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3)


class Uniform:
    """A sampler of rows with these wishes, and the same one by columns."""

    def __init__(self, wishes):
        self.plain, self.packed = Sampler(ROWS, VOCAB, 512, CPU), Sampler(ROWS, VOCAB, 512, CPU)
        self.prompt = np.array([5, 6, 7, 5, 8], dtype=np.int32)
        for row, params in enumerate(wishes):
            for one in (self.plain, self.packed):
                one.admit((Newcomer(row, params, self.prompt, 4),), (2,))
        self.bytes = torch.zeros(columns_bytes(ROWS), dtype=torch.uint8)
        self.uniform = self.packed.captured(tensor_columns(self.bytes, ROWS))

    def fill(self, rows):
        self.uniform.fill(array_columns(self.bytes.numpy(), ROWS), np.array(rows))

    def variant(self, rows, position=100):
        return self.uniform.variant_of(np.array(rows), np.full(len(rows), position))


@pytest.mark.parametrize(
    ("wishes", "variant"),
    [
        ([GREEDY] * ROWS, SamplingVariant.GREEDY),
        (
            [GREEDY, RANDOM, RANDOM.replace(seed=9, temperature=1.7), GREEDY, RANDOM, GREEDY],
            SamplingVariant.TEMPERATURE,
        ),
        (
            [CUT, GREEDY, RANDOM.replace(top_p=0.3), RANDOM, RANDOM.replace(top_k=3), RANDOM.replace(min_p=0.1)],
            SamplingVariant.CUT,
        ),
        (
            [
                CUT,
                PENALISED,
                GREEDY,
                RANDOM,
                RANDOM.replace(top_p=0.3, repetition_penalty=0.8),
                SamplingParams(seed=8, min_p=0.3),
            ],
            SamplingVariant.FULL,
        ),
    ],
)
@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5], [4, 1, 5], [2], [3, 0, 1, 4]])
def test_tokens_are_those_of_the_sampler(wishes, variant, rows):
    both = Uniform(wishes)
    both.fill(rows)
    generator = torch.Generator().manual_seed(1)
    for position in range(10, 16):
        logits = torch.randn((ROWS, VOCAB), generator=generator) * 2
        positions = torch.full((ROWS,), position)
        expected = both.plain.sample(logits[: len(rows)], np.array(rows), positions[: len(rows)].numpy()).token_ids_N
        # The rest is padding, which is sampled like a greedy row and thrown away.
        got = both.uniform.pick(variant, logits, positions)
        assert got[: len(rows)].tolist() == expected.tolist()
        assert got[len(rows) :].tolist() == logits[len(rows) :].argmax(-1).tolist()


def test_the_variant_is_the_cheapest_that_serves_all_rows():
    both = Uniform([GREEDY, RANDOM, CUT, PENALISED, GREEDY.replace(top_k=3), RANDOM.replace(min_p=0.1)])
    assert both.variant([0]) == both.variant([0, 4]) == SamplingVariant.GREEDY  # a greedy row's cuts cut nothing
    assert both.variant([0, 1]) == SamplingVariant.TEMPERATURE
    assert both.variant([2]) == both.variant([1, 5]) == both.variant([0, 2, 4]) == SamplingVariant.CUT
    assert both.variant([0, 3]) == both.variant([0, 1, 2, 3, 4, 5]) == SamplingVariant.FULL


def test_what_has_no_columns_is_sampled_by_somebody_else():
    asked = [GREEDY.replace(logit_bias={3: 1.0}), GREEDY.replace(logprobs=0), GREEDY.replace(min_tokens=20), GREEDY]
    asked.append(GREEDY.replace(logits_processors={"x": {}}))
    both = Uniform(asked)
    assert {both.variant([row, 3], position=10) for row in (0, 1, 2, 4)} == {SamplingVariant.LOGITS}
    assert both.variant([2, 3], position=24) == SamplingVariant.GREEDY  # 4 of the prompt and 20 more


@pytest.mark.parametrize(
    "variant", [SamplingVariant.GREEDY, SamplingVariant.TEMPERATURE, SamplingVariant.CUT, SamplingVariant.FULL]
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_without_finite_logits_fails_alone(variant, value):
    both = Uniform([GREEDY, CUT, PENALISED])
    both.fill([0, 1, 2])
    logits = torch.randn((3, VOCAB), generator=torch.Generator().manual_seed(0))
    whole = both.uniform.pick(variant, logits, torch.full((3,), 10))
    both = Uniform([GREEDY, CUT, PENALISED])
    both.fill([0, 1, 2])
    logits[1, 55] = value
    broken = both.uniform.pick(variant, logits, torch.full((3,), 10))
    assert broken.tolist() == [whole[0], -1, whole[2]]


def test_columns_of_padding_ask_for_nothing():
    both = Uniform([CUT, PENALISED])
    both.fill([1, 0])
    columns = array_columns(both.bytes.numpy(), ROWS)
    assert columns.rows.tolist() == [1, 0, *[NO_ROW] * 4]
    assert columns.line[2:].tolist() == columns.cut[2:].tolist() == [-1] * 4
    assert not columns.inverse_temperature[2:].any()
    assert columns.line[0] >= 0
    assert columns.cut[:2].tolist() == [-1, 1]
