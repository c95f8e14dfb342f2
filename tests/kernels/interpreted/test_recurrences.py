"""The kernels of recurrent layers against their definitions in float64, over steps of rows of any lengths."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import recurrences
from engine.kernels.recurrences import TritonRecurrences
from engine.layers.mlp import activated
from engine.layers.states import RecurrentStates, StatesOfStep
from engine.plugins.families import read_model
from engine.plugins.proof import states
from engine.settings import own_kernels
from tests.kernels.interpreted.test_layers import close, normal
from tests.models.checkpoints import build, save
from tests.models.conftest import load

CPU = torch.device("cpu")
OURS = TritonRecurrences()
# New tokens of each row in each step, 0 for none: decodes, chunks' borders, and rows of both kinds side by side.
CUTS = ((67, 1, 3), (1, 0, 16), (1, 65, 1), (40, 1, 1), (1, 1, 1))
LENGTHS = np.array(CUTS).sum(0)


def rows_of(inputs: Tensor) -> list[Tensor]:
    return list(inputs.split(LENGTHS.tolist()))


def in_steps(states: RecurrentStates, compute, *columns: Tensor) -> Tensor:
    """All results, the rows one after another.  columns: their tokens' numbers, in this order as well."""
    states.data.fill_(torch.nan)
    done, outs = np.zeros(len(LENGTHS), dtype=np.int32), [[] for _ in LENGTHS]
    ends = np.cumsum(LENGTHS)
    for cut in np.array(CUTS, dtype=np.int32):
        (rows,) = cut.nonzero()
        tokens = np.concatenate([ends[row] - LENGTHS[row] + done[row] + np.arange(cut[row]) for row in rows])
        done += cut
        step = StatesOfStep(states, 2 * rows[::-1] + 1, done[rows][::-1].copy(), cut[rows][::-1].copy())
        order = np.concatenate([tokens[cut[rows][:at].sum() :][: cut[rows][at]] for at in reversed(range(len(rows)))])
        new = compute(step, *(one[torch.from_numpy(order)] for one in columns))
        for row, out in zip(rows[::-1], new.split(cut[rows][::-1].tolist()), strict=True):
            outs[row].append(out)
    assert states.data[::2].isnan().all(), "slots of no row"
    return torch.cat([torch.cat(one) for one in outs])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("taps,channels,bias,silu", [(4, 300, True, True), (3, 24, False, False), (2, 5, True, False)])
def test_convolution_keeps_the_last_inputs_of_each_row(dtype, taps, channels, bias, silu):
    total = int(LENGTHS.sum())
    x = normal(total, 2 * channels, dtype=dtype)[:, channels:]  # a part of a product's columns
    weight = normal(taps, channels, seed=1)
    bias_C = normal(channels, seed=2, dtype=dtype) if bias else None
    states = RecurrentStates([[(taps - 1, channels)]], 2 * len(LENGTHS), CPU)
    found = in_steps(states, lambda step, x: OURS.convolve(x, weight, bias_C, states.layers[0][0], step, silu), x)
    expected = []
    for row in rows_of(x.double()):
        padded = F.pad(row.t()[None], (taps - 1, 0))
        expected.append(F.conv1d(padded, weight.t()[:, None].double(), groups=channels)[0].t())
    y = torch.cat(expected) + (0.0 if bias_C is None else bias_C.double())
    close(found, F.silu(y) if silu else y)


def definition(q, k, v, g, b) -> Tensor:
    """One row's results, float64, token by token; b is None if keys and values are only added."""
    m, outs = torch.zeros(*k.shape[1:], v.shape[2], dtype=torch.float64), []
    for at in range(len(v)):
        m = m * g[at].exp()[:, None, None]
        added = v[at] if b is None else (v[at] - torch.einsum("hk,hkv->hv", k[at], m)) * b[at][:, None]
        m = m + k[at][:, :, None] * added[:, None]
        outs.append(torch.einsum("hk,hkv->hv", q[at], m))
    return torch.stack(outs)


def within(found: Tensor, expected: Tensor) -> None:
    """Sums over many tokens in float32: relative to the largest of them."""
    assert (found.double() - expected).abs().max() <= 2e-5 * max(1.0, float(expected.abs().max()))


SIZES = pytest.mark.parametrize(
    "heads,groups,key,value,strong",
    [(4, 2, 16, 16, False), (3, 1, 20, 40, False), (2, 2, 8, 33, True)],
)


@SIZES
@pytest.mark.parametrize("fewest", [1, 16, 1000], ids=["chunks", "both", "token by token"])
def test_delta_rule(monkeypatch, fewest, heads, groups, key, value, strong):
    monkeypatch.setattr(recurrences, "FEWEST", fewest)
    total = int(LENGTHS.sum())
    qkv = normal(total, 2 * groups * key + heads * value)
    gates = normal(total, 2 * heads, seed=1) * (4.0 if strong else 1.0)
    decay, bias = -normal(heads, seed=2).exp() * (10.0 if strong else 0.3), normal(heads, seed=3)
    states, most = RecurrentStates([[(heads, key, value)]], 2 * len(LENGTHS), CPU), 2.0 if groups == 1 else 1.0

    def compute(step, qkv, gates):
        a, b = gates.chunk(2, -1)
        return OURS.delta(qkv, a, b, decay, bias, most, states.layers[0][0], step)

    found = in_steps(states, compute, qkv, gates)
    q, k, v = qkv.double().split([groups * key, groups * key, heads * value], -1)
    q, k = (
        (one / (one.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(heads // groups, 1)
        for one in (q.unflatten(1, (groups, key)), k.unflatten(1, (groups, key)))
    )
    a, b = gates.double().chunk(2, -1)
    columns = (q * key**-0.5, k, v.unflatten(1, (heads, value)), decay * F.softplus(a + bias), most * b.sigmoid())
    within(found, torch.cat([definition(*row) for row in zip(*map(rows_of, columns), strict=True)]))


@SIZES
@pytest.mark.parametrize("fewest", [1, 16, 1000], ids=["chunks", "both", "token by token"])
def test_mamba2(monkeypatch, fewest, heads, groups, key, value, strong):
    monkeypatch.setattr(recurrences, "FEWEST", fewest)
    total = int(LENGTHS.sum())
    xkq = normal(total, heads * value + 2 * groups * key)
    sizes = normal(total, heads, seed=1) * (4.0 if strong else 1.0) - 2.0
    decay, bias, skip = -normal(heads, seed=2).exp() * (10.0 if strong else 0.3), *normal(2, heads, seed=3)
    states = RecurrentStates([[(heads, key, value)]], 2 * len(LENGTHS), CPU)

    def compute(step, xkq, sizes):
        return OURS.ssd(xkq, sizes, decay, bias, skip, 0.05, states.layers[0][0], step)

    found = in_steps(states, compute, xkq, sizes)
    x, k, q = xkq.double().split([heads * value, groups * key, groups * key], -1)
    x = x.unflatten(1, (heads, value))
    q, k = (one.unflatten(1, (groups, key)).repeat_interleave(heads // groups, 1) for one in (q, k))
    step_sizes = F.softplus(sizes.double() + bias).clamp(min=0.05)
    columns = (q, k, x * step_sizes[..., None], decay * step_sizes)
    results = torch.cat([definition(*row, None) for row in zip(*map(rows_of, columns), strict=True)])
    within(found, results + x * skip[:, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_groups,group", [(4, 16), (1, 40), (3, 1500)])
@pytest.mark.parametrize("weights", ["none", "of a group", "of a row"])
@pytest.mark.parametrize("gated_first", [False, True])
def test_gate_and_norm(dtype, num_groups, group, weights, gated_first):
    width = num_groups * group
    o, z = normal(5, width), normal(5, 2 * width, seed=1, dtype=dtype)[:, :width]
    weight = {"none": None, "of a group": normal(group, seed=2), "of a row": normal(width, seed=2)}[weights]
    kind = "sigmoid" if weights == "of a row" else "silu"
    gates = activated(z.double(), kind)
    y = o.double() * (gates if gated_first else 1.0)
    if weight is not None:
        y = F.rms_norm(y.unflatten(1, (num_groups, group)), (group,), None, 1e-5).flatten(1)
        y *= weight.double() if len(weight) == width else weight.double().repeat(num_groups)
    close(OURS.gate(o, z, weight, num_groups, 1e-5, gated_first, kind), y * (1.0 if gated_first else gates))


@pytest.mark.parametrize("kind", ["qwen3-5", "falcon-h1"])
def test_by_rows_a_token_has_the_same_bits_however_its_prompt_is_cut(monkeypatch, tmp_path, kind):
    monkeypatch.setenv(own_kernels.VARIABLE, "triton")
    monkeypatch.setattr(states, "CUTS", ((20, 1, 1, 3), (1, 1, 1), (4, 17)))
    model = load(read_model(save(build(kind), tmp_path)))
    model.by_rows()
    part, shape = model.layers[0].recurrent, model.shape.layers[0].recurrent
    assert part.recurrences.rowwise
    states.require_same_states(part, shape, model.shape.hidden_size, CPU, torch.float32)
