"""Random calls of each function in C: with shapes, numbers and threads by chance, next to its definition in float64.

Legend: T rows · D model dim · Q query heads · G KV heads · H head size · S slots · I inputs · O outputs · V vocabulary
Owns: what is called by chance, and how far a result may be off.  Does not know: how the kernels were compiled.
"""

from collections.abc import Callable
from random import Random

import numpy as np
import torch
from torch import Tensor

from engine.kernels.attention import compiled_attention
from engine.kernels.blocks import Format, Parts, StoredWeight, block_products
from engine.kernels.cpu import CPUKernels, cpu_kernels
from engine.kernels.panels import PanelKind, PanelWeight, products
from engine.layers.attention import AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.layers.states import RecurrentStates, StatesOfStep
from engine.plugins.support.paging import batch_on
from engine.sampling.draw import (
    BLOCK,
    padded_scores,
    padded_width,
    stream_starts,
    uniforms,
    weights,
)
from tests.kernels.recurrences import convolution, gated_delta, mamba_2
from tests.kernels.stored_blocks import SIZE, random_rows
from tests.sanitized.sanitizers import mallocs

CPU = torch.device("cpu")
SIZES = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200)
# What is not a number of every day: each may reach its own row, and no other.
ODD = (torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 1e-38, 1e-42, 0.0)


def kernels() -> CPUKernels:
    found = cpu_kernels()
    assert found is not None
    return found


def size(dice: Random, most: int = SIZES[-1]) -> int:
    """Near a vector's width more often than elsewhere."""
    return dice.choice([one for one in SIZES if one <= most]) if dice.random() < 0.7 else dice.randint(1, most)


def rows(dice: Random) -> int:
    """A number of rows of a step: few as a rule, many at times, none seldom."""
    return dice.choice((0, 1, 1, 1, 2, 3, 5, 6, 7, 12, 13, 25, dice.randint(1, 90)))


def spoiled(dice: Random, x_TI: Tensor) -> Tensor:
    """The rows that got odd numbers; one call in three has some."""
    odd_T = torch.zeros(len(x_TI), dtype=torch.bool)
    if x_TI.numel() and dice.random() < 0.3:
        for _ in range(dice.randint(1, 4)):
            row = dice.randrange(len(x_TI))
            flat = x_TI[row].view(-1)
            flat[dice.randrange(len(flat))], odd_T[row] = dice.choice(ODD), True
    return odd_T


def close(found: Tensor, expected: Tensor, bound: float | Tensor) -> None:
    """Every number is as far from float64's as the bound at most."""
    off = (found.double() - expected.double()).abs()
    wrong = ~(off <= bound)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} numbers are up to {float(off.nan_to_num(9e9).max())} off"
    )


def add_norm(dice: Random) -> None:
    num_rows, dim = rows(dice), dice.choice((size(dice), 1000))
    x_TD, update_TD, weight_D = torch.randn(num_rows, dim), torch.randn(num_rows, dim), torch.randn(dim)
    odd_T = spoiled(dice, x_TD)
    update = update_TD if dice.random() < 0.7 else None
    sum_TD = x_TD if update is None else x_TD + update
    found_TD = kernels().add_norm(x_TD, update, weight_D, 1e-6)
    wide_TD = sum_TD.double()
    expected_TD = wide_TD / (wide_TD.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight_D.double()
    close(found_TD[~odd_T], expected_TD[~odd_T], 1e-4)
    assert torch.equal(x_TD[~odd_T], sum_TD[~odd_T])


def turn(dice: Random) -> None:
    frequencies_R = torch.rand(size(dice)) ** 4
    positions_T = torch.randint(1 << dice.randint(1, 20), (rows(dice),))
    scale = dice.choice((1.0, 0.5))
    found_TH = kernels().angle_table(positions_T, frequencies_R, scale)
    angles_TR = (positions_T[:, None].float() * frequencies_R).double()
    close(found_TH, torch.cat([angles_TR.cos(), angles_TR.sin()], -1) * scale, 1e-5)


def rotate_and_store(dice: Random) -> None:
    num_rows, num_kv, half = rows(dice), dice.randint(1, 4), size(dice, 64)
    num_heads, num_slots = num_kv * dice.randint(1, 4), num_rows + dice.randint(1, 20)
    qkv_TAH = torch.randn(num_rows, num_heads + 2 * num_kv, 2 * half)
    odd_T = spoiled(dice, qkv_TAH)
    weight_RH = torch.randn(num_heads + num_kv, 2 * half) if dice.random() < 0.5 else None
    angles_TR = torch.rand(num_rows, half) * 6
    pools = torch.full((2, num_slots, num_kv, 2 * half), torch.nan)
    slots_T = torch.randperm(num_slots)[:num_rows]
    slots_T[torch.rand(num_rows) < 0.1] = -1
    given = (qkv_TAH, weight_RH, 1e-6, torch.cat([angles_TR.cos(), angles_TR.sin()], -1), *pools)
    if num_rows and dice.random() < 0.1:
        beyond_T = slots_T.clone()
        beyond_T[dice.randrange(num_rows)] = num_slots + dice.randint(0, 1 << 40)
        try:
            kernels().rotate_and_store(*given, beyond_T)
        except IndexError:
            assert pools.isnan().all(), "a step that is refused has written"
        else:
            raise AssertionError(f"a slot beyond {num_slots} was taken")
    found_TQH = kernels().rotate_and_store(*given, slots_T)
    heads_TRH, values_TGH = qkv_TAH[:, :-num_kv].double(), qkv_TAH[:, -num_kv:]
    if weight_RH is not None:
        heads_TRH = heads_TRH / (heads_TRH.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight_RH.double()
    left, right = heads_TRH.split(half, -1)
    cosine, sine = angles_TR.cos().double()[:, None], angles_TR.sin().double()[:, None]
    turned_TRH = torch.cat([left * cosine - right * sine, right * cosine + left * sine], -1)
    kept_T = (slots_T >= 0) & ~odd_T
    close(found_TQH[~odd_T], turned_TRH[~odd_T, :num_heads], 1e-4)
    close(pools[0][slots_T[kept_T]], turned_TRH[kept_T, num_heads:], 1e-4)
    assert torch.equal(pools[1][slots_T[kept_T]], values_TGH[kept_T])
    others_S = torch.ones(num_slots, dtype=torch.bool).scatter(0, slots_T[slots_T >= 0], False)
    assert pools[:, others_S].isnan().all(), "a slot that no token has was written"


def gate(dice: Random) -> None:
    num_rows, width = rows(dice), dice.choice((size(dice), 1000))
    gate_up_T2I = torch.randn(num_rows, 2 * width) * dice.choice((1.0, 40.0, 1e4))
    odd_T = spoiled(dice, gate_up_T2I)
    found_TI = kernels().gated(gate_up_T2I)
    x_TI, y_TI = gate_up_T2I.double().split(width, -1)
    expected_TI = torch.nn.functional.silu(x_TI) * y_TI
    close(found_TI[~odd_T], expected_TI[~odd_T], (expected_TI.abs() * 1e-5 + 1e-6 * y_TI.abs())[~odd_T])
    assert not found_TI[x_TI.isnan() | y_TI.isnan()].isfinite().any()


def likeliest(dice: Random) -> None:
    logits_nV = torch.randn(rows(dice), dice.choice((size(dice), 3000)))
    spoiled(dice, logits_nV)
    if len(logits_nV) and dice.random() < 0.1:
        logits_nV[dice.randrange(len(logits_nV))] = -torch.inf
    top_n, token_ids_n = logits_nV.max(-1)
    assert torch.equal(kernels().likeliest(logits_nV), torch.where(top_n.isfinite(), token_ids_n, -1))


def weighed(dice: Random) -> None:
    """Scores, weights and sums of rows, on any number of threads."""
    logits_nV = torch.randn(rows(dice), dice.choice((size(dice), 3000))) * dice.choice((1.0, 30.0))
    odd_n = spoiled(dice, logits_nV)
    factors_n, width = 0.1 + 3 * torch.rand(len(logits_nV)), padded_width(logits_nV.shape[1])
    with_weights = dice.random() < 0.7
    top_n, scores_nW, weights_nW = kernels().weighed(logits_nV, factors_n, width, with_weights=with_weights)
    assert torch.equal(top_n.nan_to_num(7), logits_nV.amax(-1).nan_to_num(7))
    expected_nW = padded_scores(logits_nV, top_n, factors_n)
    assert torch.equal(scores_nW[~odd_n], expected_nW[~odd_n])
    if weights_nW is not None:
        close(weights_nW[~odd_n], weights(expected_nW.double())[~odd_n], 1e-6)
        num_blocks, starts_n = width // BLOCK, stream_starts(torch.randint(1 << 62, (len(logits_nV),)))
        expected_n = kernels().draw(weights_nW, num_blocks, starts_n, starts_n >> 33)
        drawn_n = kernels().weighed_and_drawn(logits_nV, factors_n, width, num_blocks, starts_n, starts_n >> 33)
        assert torch.equal(drawn_n, torch.where(top_n.isfinite(), expected_n, -1))
    found_n, log_n = kernels().log_sums(logits_nV)
    assert torch.equal(found_n.nan_to_num(7), top_n.nan_to_num(7))
    close(log_n[~odd_n], (logits_nV.double() - top_n[:, None]).logsumexp(-1)[~odd_n], 1e-5)


def draws(dice: Random) -> None:
    num_rows = 1 + rows(dice)
    weights_nW = torch.rand(num_rows, BLOCK * dice.randint(1, 6)) ** dice.choice((1, 9))
    weights_nW[torch.rand(weights_nW.shape) < dice.random()] = 0.0
    odd_n = spoiled(dice, weights_nW)
    starts_n, positions_n = stream_starts(torch.randint(1 << 62, (num_rows,))), torch.randint(1 << 31, (num_rows,))
    num_blocks = weights_nW.shape[1] // BLOCK
    found_n = kernels().draw(weights_nW, num_blocks, starts_n, positions_n)
    sums_nW = weights_nW.double().cumsum(-1)
    total_n, at_n1 = sums_nW[:, -1], found_n[:, None]
    above_n, own_n = (of_nW.gather(1, at_n1).squeeze(1) for of_nW in (sums_nW, weights_nW.double()))
    target_n, off_n = uniforms(starts_n, positions_n) * total_n, 1e-6 * total_n
    good_n = (above_n - own_n <= target_n + off_n) & (target_n <= above_n + off_n) & ((own_n > 0) | (total_n == 0))
    assert (good_n | odd_n).all(), f"{found_n} at {target_n} of {sums_nW}"
    assert 0 <= int(found_n.min()) <= int(found_n.max()) < weights_nW.shape[1]


def ends_of_float32(dice: Random) -> None:
    """Odd numbers alone among numbers of every day, as a weight of each kind and as both sides of a gate."""
    functions = products()
    for odd in ODD:
        weight_OI = torch.randn(3, 70) * dice.choice((1.0, abs(odd)))
        weight_OI[1, dice.randrange(70)] = odd
        for kind in PanelKind if functions is not None else ():
            found_O = PanelWeight(functions, weight_OI, kind)(torch.ones(1, 70), None)[0]
            assert weight_OI[1].isfinite().all() or not found_O[1].isfinite()
    x_T, y_T = torch.cartesian_prod(torch.tensor(ODD), torch.tensor(ODD)).T
    found_T = kernels().gated(torch.stack([x_T, y_T], 1))[:, 0]
    assert found_T[x_T.isnan() | y_T.isnan()].isnan().all()


def product(dice: Random) -> None:
    functions = products()
    if functions is None:
        return
    num_rows, inputs, outputs = (
        rows(dice),
        dice.choice((size(dice), size(dice), 700, 700, 0)),
        dice.choice((size(dice), 300)),
    )
    kind, strange = dice.choice(list(PanelKind)), dice.random() < 0.2
    weight_OI = torch.randn(outputs, inputs) * (10.0 ** dice.randint(-42, 36) if strange else 1.0)
    weight_OI = {PanelKind.HALVES: weight_OI.half(), PanelKind.UPPER_HALVES: weight_OI.bfloat16()}.get(
        kind, weight_OI
    ).float()
    odd_O = spoiled(dice, weight_OI) | (strange and kind >= PanelKind.BYTES)
    weight = PanelWeight(functions, weight_OI, kind)
    x_TJ = torch.randn(num_rows, inputs + dice.choice((0, 0, 5)))
    x_TI, odd_T = x_TJ[:, :inputs], spoiled(dice, x_TJ)
    bias_O = torch.randn(outputs) if dice.random() < 0.5 else None
    found_TO = _with_little_memory(dice, lambda: weight(x_TI, bias_O))
    if kind is PanelKind.PAIRS:  # both factors are rounded, and only then multiplied
        x_TI, weight_OI = x_TI.bfloat16(), weight_OI.bfloat16()
    expected_TO = x_TI.double() @ weight_OI.double().T + (0 if bias_O is None else bias_O.double())
    terms_TO = x_TI.double().abs() @ weight_OI.double().abs().T + 1  # numbers near 0 may be 0
    bound_TO = terms_TO * inputs * 2**-23
    if kind >= PanelKind.BYTES:
        bound_TO = _rounded_by(x_TI, weight_OI, kind) + terms_TO * 1e-5
    plain_TO = ~odd_T[:, None] & ~odd_O & (terms_TO < 1e37)
    close(found_TO[plain_TO], expected_TO[plain_TO], bound_TO[plain_TO])


def block_product(dice: Random) -> None:
    """A weight of one to three parts, each in a format of its own, next to its rows as floats."""
    functions = block_products()
    if functions is None:
        return
    inputs, num_rows, formats = 256 * dice.randint(1, 3), rows(dice), dice.sample(list(Format), dice.randint(1, 3))
    if all(SIZE[one] == 32 for one in formats):
        inputs = 32 * dice.randint(1, 20)
    stored = [random_rows(dice, one, dice.choice((size(dice), 300)), inputs) for one in formats]
    parts = dice.choice(list(Parts))
    weight = StoredWeight(functions, stored, parts)
    weight_OI = weight.rows(torch.arange(weight.outputs))
    for one in stored:  # any bits are a block: its scales may be infinite, or no numbers
        one.blocks.random_(0, 256)
    StoredWeight(functions, stored, parts)(torch.randn(num_rows, inputs), None)
    x_TJ = torch.randn(num_rows, inputs + dice.choice((0, 0, 5)))
    x_TI, odd_T = x_TJ[:, :inputs], spoiled(dice, x_TJ)
    bias_O = torch.randn(weight.outputs) if dice.random() < 0.5 else None
    found_TO = _with_little_memory(dice, lambda: weight(x_TI, bias_O))
    expected_TO = x_TI.double() @ weight_OI.double().T + (0 if bias_O is None else bias_O.double())
    unit_T1 = x_TI.double().abs().amax(1, keepdim=True) / (126 << 7 * (parts - 1))
    bound_TO = unit_T1 * weight_OI.double().abs().sum(1) + (x_TI.double().abs() @ weight_OI.double().abs().T + 1) * 1e-6
    close(found_TO[~odd_T], expected_TO[~odd_T], bound_TO[~odd_T])


def _rounded_by(x_TI: Tensor, weight_OI: Tensor, kind: PanelKind) -> Tensor:
    """The error that a product of bytes may have, with half a unit of each factor's group."""
    x_TI, weight_OI = x_TI.double(), weight_OI.double()
    x_unit_TI, weight_unit_OI = (_largest_of_groups(one) for one in (x_TI, weight_OI))
    x_unit_TI *= 0.51 / (63 if kind is PanelKind.BYTES else 8191)
    weight_unit_OI *= 0.51 / 126
    return x_unit_TI @ (weight_OI.abs() + weight_unit_OI).T + x_TI.abs() @ weight_unit_OI.T


def _largest_of_groups(x_TI: Tensor, group: int = 64) -> Tensor:
    groups = torch.nn.functional.pad(x_TI.abs(), (0, -x_TI.shape[1] % group)).unflatten(
        1, (-(-x_TI.shape[1] // group), group)
    )
    return groups.amax(-1).repeat_interleave(group, -1)[:, : x_TI.shape[1]]


def _with_little_memory(dice: Random, call: Callable[[], Tensor]) -> Tensor:
    """The result; in one call of four, each of its calls of malloc has failed before, and that was an error."""
    with mallocs(1 << 40) as counted:
        found = call()
        there_were = counted()
    if dice.random() < 0.25:
        for count in range(there_were):
            try:
                with mallocs(count):
                    call()
            except MemoryError:
                continue
            raise AssertionError(f"{count} of {there_were} calls of malloc were enough")
    return found


def attention(dice: Random) -> None:
    num_kv, head_size, page = dice.randint(1, 5), dice.choice((size(dice, 130), 64, 128)), dice.choice((1, 3, 16, 64))
    num_heads, window = num_kv * dice.choice((1, 1, 2, 3, 8, 25)), dice.choice((0, 0, 1, dice.randint(1, 200)))
    lengths = [size(dice, dice.choice((8, 40, 300))) for _ in range(dice.randint(1, 4))]
    counts = sorted(
        (1 if dice.random() < 0.5 else dice.randint(1, one) for one in lengths), key=lambda count: count != 1
    )
    lengths = [max(pair) for pair in zip(lengths, counts, strict=True)]
    spec = AttentionSpec(1, num_heads, num_kv, head_size, head_size**-0.5, window=window)
    num_pages = [-(-length // page) for length in lengths]
    pool = KVPool(1, sum(num_pages) + 2, page, num_kv, head_size, torch.float32, CPU)
    pool.data.fill_(torch.nan)
    order, table_BP = torch.randperm(sum(num_pages) + 2), np.zeros((len(lengths), max(num_pages)), dtype=np.int32)
    backend = compiled_attention(spec, pool)
    assert backend is not None
    expected, queries, first = [], [], 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        pages = order[first : first + num_pages[row]]
        first, table_BP[row, : num_pages[row]] = first + num_pages[row], pages.numpy()
        keys_LGH, values_LGH, q_NQH = (
            torch.randn(n, heads, head_size) for n, heads in ((length, num_kv), (length, num_kv), (count, num_heads))
        )
        position_L = torch.arange(length)
        slots_L = pages[position_L // page] * pool.page_stride + position_L % page
        pool.keys(0)[slots_L], pool.values(0)[slots_L] = keys_LGH, values_LGH
        queries.append(q_NQH * dice.choice((1.0, 1.0, 30.0)))
        expected.append(_attended(spec, queries[-1], keys_LGH, values_LGH))
    num_decodes = sum(count == 1 for count in counts)
    backend.plan_step(
        batch_on(CPU, num_decodes, table_BP, *(np.array(one, dtype=np.int32) for one in (lengths, counts)))
    )
    close(backend.attend(0, torch.cat(queries)), torch.cat(expected), 1e-3)


def _attended(spec: AttentionSpec, q_NQH: Tensor, keys_LGH: Tensor, values_LGH: Tensor) -> Tensor:
    keys, values = (
        one.double().repeat_interleave(spec.num_heads // spec.num_kv_heads, 1) for one in (keys_LGH, values_LGH)
    )
    scores_QNL = torch.einsum("nqh,lqh->qnl", q_NQH.double(), keys) * spec.scale
    position_N1 = torch.arange(len(keys) - len(q_NQH), len(keys))[:, None]
    behind_NL = position_N1 - torch.arange(len(keys))
    hidden_NL = (behind_NL < 0) | (behind_NL >= (spec.window or len(keys)))
    return torch.einsum("qnl,lqh->nqh", scores_QNL.masked_fill(hidden_NL, -torch.inf).softmax(-1), values)


def recurrences(dice: Random) -> None:
    """Rows of any lengths in slots by chance, some of which begin, through all that a recurrent layer computes."""
    groups, key, value, taps = dice.randint(1, 3), size(dice, 65), size(dice, 130), dice.randint(2, 5)
    heads, num_rows = groups * dice.randint(1, 3), dice.randint(1, 4)
    counts = np.array([dice.choice((1, 1, dice.randint(2, 40))) for _ in range(num_rows)], dtype=np.int32)
    width = 2 * groups * key + heads * value
    states = RecurrentStates([[(taps - 1, width), (heads, key, value)]], num_rows + 2, CPU)
    states.data.fill_(torch.nan)
    slots = np.array(dice.sample(range(num_rows + 2), num_rows), dtype=np.int64)
    before = np.array([dice.choice((0, 5)) for _ in range(num_rows)], dtype=np.int32)
    states.data[slots[before > 0]] = 0.0
    step, (windows, matrices) = StatesOfStep(states, slots, counts + before, counts), states.layers[0]
    decays = dice.choice((heads, heads * key))
    weight_KC, bias_C = torch.randn(taps, width), torch.randn(width)
    x_TI = torch.randn(counts.sum(), width + decays + heads)
    odd_T = spoiled(dice, x_TI)
    is_odd = [bool(part.any()) for part in odd_T.split(counts.tolist())]
    x_TC, a_TA, b_TH = x_TI.split((width, decays, heads), 1)
    a_TH, of_heads, bias_A = a_TA[:, :heads], (-torch.rand(heads), torch.randn(heads)), torch.randn(decays)
    found = kernels().recurrences
    assert found is not None
    given, most = dice.choice((None, bias_C)), dice.choice((1.0, 2.0))
    y_TC = found.convolve(x_TC, weight_KC, given, windows, step, False)
    if is_delta := dice.random() < 0.5:
        o_THV = found.delta(y_TC.clone(), a_TA, b_TH, of_heads[0], bias_A, most, matrices, step)
    else:
        o_THV = found.ssd(y_TC, a_TH, *of_heads, of_heads[1], 0.01, matrices, step)
    z_TI = torch.randn(len(o_THV), heads * value)
    weight = dice.choice((None, torch.ones(value), torch.ones(heads * value)))
    gated_TI = found.gate(
        o_THV.flatten(1).clone(), z_TI, weight, heads, 1e-6, dice.random() < 0.5, dice.choice(("silu", "sigmoid"))
    )
    for row, tokens in enumerate(torch.arange(len(x_TI)).split(counts.tolist())):
        if is_odd[row]:
            continue
        close(y_TC[tokens], convolution(x_TC[tokens], weight_KC, given), 1e-4)
        sizes = (groups, key)
        if is_delta:
            expected_THV = gated_delta(y_TC[tokens], a_TA[tokens], b_TH[tokens], of_heads[0], bias_A, most, *sizes)
        else:
            expected_THV = mamba_2(y_TC[tokens], a_TH[tokens], *of_heads, of_heads[1], 0.01, *sizes)
        close(o_THV[tokens], expected_THV, 1e-4 * (1 + float(expected_THV.abs().max())))
        assert gated_TI[tokens].isfinite().all()
    others = [slot for slot in range(num_rows + 2) if slot not in slots]
    assert states.data[others].isnan().all(), "a slot that no row has was written"


CALLS = (
    *(ends_of_float32, add_norm, turn, rotate_and_store, gate, likeliest, weighed, draws),
    *(product, product, block_product, block_product, attention, attention, recurrences, recurrences),
)
