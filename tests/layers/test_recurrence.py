"""The recurrence of many tokens equals that of one token after the other, in any batch."""

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.layers import recurrence
from engine.layers.recurrence import RecurrenceTerms, advance
from engine.layers.states import RecurrentStates, StatesOfStep

CPU = torch.device("cpu")
HEADS, KEY, VALUE = 3, 8, 5
LENGTHS = (1, 5, 64, 65, 200)


def new_terms(length: int, delta: bool, strong: bool = False, by_number: bool = False) -> RecurrenceTerms:
    generator = torch.Generator().manual_seed(length)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    k = torch.nn.functional.normalize(random(length, HEADS, KEY), dim=-1)
    g = -random(length, HEADS, KEY if by_number else 1).exp() * (30.0 if strong else 0.3)
    b = random(length, HEADS).sigmoid() if delta else None
    return RecurrenceTerms(random(length, HEADS, KEY), k, random(length, HEADS, VALUE), g, b)


def by_definition(terms: RecurrenceTerms) -> Tensor:
    """The results in float64, token by token."""
    q, k, v, g = (one.double() for one in (terms.q_THK, terms.k_THK, terms.v_THV, terms.g_THX))
    m, outs = torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64), []
    for at in range(len(v)):
        m = m * g[at].exp()[..., None]
        added = v[at]
        if terms.b_TH is not None:
            added = (added - torch.einsum("hk,hkv->hv", k[at], m)) * terms.b_TH[at].double()[:, None]
        m = m + k[at][:, :, None] * added[:, None]
        outs.append(torch.einsum("hk,hkv->hv", q[at], m))
    return torch.stack(outs)


def in_cuts(many: list[RecurrenceTerms], cut: int) -> list[Tensor]:
    """All rows side by side, with so many new tokens a step, or what is left."""
    states = RecurrentStates([[(HEADS, KEY, VALUE)]], len(many), CPU)
    states.data.fill_(torch.nan)
    outs: list[list[Tensor]] = [[] for _ in many]
    for start in range(0, max(LENGTHS), cut):
        rows = [row for row, one in enumerate(many) if len(one.v_THV) > start]
        parts = [many[row].at(slice(start, start + cut)) for row in rows]
        counts = np.array([len(one.v_THV) for one in parts], dtype=np.int32)
        step = StatesOfStep(states, np.array(rows), counts + np.int32(start), counts)
        joined = [
            None if column[0] is None else torch.cat(column)
            for column in zip(*((p.q_THK, p.k_THK, p.v_THV, p.g_THX, p.b_TH) for p in parts), strict=True)
        ]
        found = advance(RecurrenceTerms(*joined), states.layers[0][0], step)
        for row, part in zip(rows, found.split(counts.tolist()), strict=True):
            outs[row].append(part)
    return [torch.cat(one) for one in outs]


@pytest.mark.parametrize("strong", [False, True], ids=["weak decay", "strong decay"])
@pytest.mark.parametrize("delta,by_number", [(False, False), (True, False), (True, True)], ids=["sums", "delta", "KDA"])
@pytest.mark.parametrize("large", [recurrence.LARGE, 1], ids=["gathered", "in place"])
@pytest.mark.parametrize("cut", [1, 2, 7, 64, 200])
def test_tokens_in_steps_of_any_size_give_the_recurrence(
    cut: int, large: int, delta: bool, by_number: bool, strong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrence, "LARGE", large)
    many = [new_terms(length, delta, strong, by_number) for length in LENGTHS]
    for found, terms in zip(in_cuts(many, cut), many, strict=True):
        expected = by_definition(terms)
        assert (found - expected).abs().max() <= 2e-5 * max(1.0, expected.abs().max())
