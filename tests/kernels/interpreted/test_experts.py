"""The kernel for a mixture of experts against the sum that it stands for, in float64, and in its layer."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from safetensors.torch import save_file
from torch import Tensor

from engine.checkpoints.quantization import Quantization
from engine.checkpoints.shape import ExpertsShape, RouterShape
from engine.checkpoints.shards import read_shards
from engine.formats.mxfp4 import CodesReader, MXFP4Reader, decoded
from engine.formats.quantized import QuantizedReader
from engine.kernels import experts as kernel
from engine.kernels.experts import mix_experts
from engine.kernels.float8 import rounded
from engine.kernels.fused import FusedKernels
from engine.layers.comm import Unconnected
from engine.layers.experts import Experts
from engine.layers.float8_experts import BLOCK, EightBits
from engine.layers.four_bits import FourBits, StoredCodes
from engine.layers.mlp import clamped_swish
from engine.layers.norm import RMSNorm
from engine.layers.summed_norm import PartsNorm
from engine.plugins.comm.local import LocalComm
from engine.plugins.testing.model import WAITING, RecordedOperations
from engine.types.errors import ConfigError
from tests.kernels.interpreted.planting import with_mistake
from tests.kernels.interpreted.test_layers import normal, rounding

LIMIT, SLOPE = 1.5, 1.702


def by_definition(x, weights, chosen, gate_up, down, gate_up_bias, down_bias, kind) -> Tensor:
    """Each token's experts one by one, float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for weight, expert in zip(weights[token].double(), chosen[token].tolist(), strict=True):
            both = gate_up[expert].double() @ row
            both = both if gate_up_bias is None else both + gate_up_bias[expert].double()
            if kind == "clamped_swish":
                inner = clamped_swish(both, LIMIT, SLOPE)
            else:
                gate, up = both.chunk(2)
                inner = (F.silu(gate) if kind == "silu" else F.gelu(gate)) * up
            result = down[expert].double() @ inner
            out[token] += weight * (result if down_bias is None else result + down_bias[expert].double())
    return out


@pytest.mark.parametrize(
    "dtype,kind,num_tokens,num_experts,num_chosen,width,inner,biased",
    [
        (torch.float32, "silu", 1, 5, 2, 24, 40, False),
        (torch.float32, "clamped_swish", 7, 5, 3, 72, 48, True),
        (torch.float32, "gelu", 90, 2, 1, 40, 33, False),  # wide tiles, more than one of an expert, one with a rest
        (torch.float32, "silu", 270, 2, 1, 40, 33, False),  # the widest tiles
        (torch.bfloat16, "silu", 9, 4, 2, 136, 72, False),
    ],
)
def test_the_sum_over_a_tokens_experts(dtype, kind, num_tokens, num_experts, num_chosen, width, inner, biased):
    x = normal(num_tokens, width, dtype=dtype)
    chosen = torch.stack([torch.randperm(num_experts)[:num_chosen] for _ in range(num_tokens)])
    chosen[:, 0][chosen[:, 0] == 1] = chosen[0, 0]  # perhaps an expert without tokens; twice the same does no harm
    weights = normal(num_tokens, num_chosen, seed=1).softmax(-1).to(dtype)
    gate_up = normal(num_experts, 2 * inner, width, seed=2, dtype=dtype) * width**-0.5
    down = normal(num_experts, width, inner, seed=3, dtype=dtype) * inner**-0.5
    biases = (None, None)
    if biased:
        biases = normal(num_experts, 2 * inner, seed=4, dtype=dtype), normal(num_experts, width, seed=5, dtype=dtype)
    found = mix_experts(x, weights, chosen, gate_up, down, *biases, kind, LIMIT, SLOPE)
    expected = by_definition(x, weights, chosen, gate_up, down, *biases, kind)
    assert found.dtype == dtype
    # What lies between the products is rounded, and so is each expert's result.
    bound = 4 * rounding(dtype) + 5e-6
    torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)


@triton.jit
def note_tiles(found, num_tiles, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr):
    """Note which tile and which columns each program has."""
    tile, columns = kernel.near_tile(num_tiles, WIDTH, 10, AT_ONCE)
    tl.store(found + 2 * tl.program_id(0), tile)
    tl.store(found + 2 * tl.program_id(0) + 1, columns)


@pytest.mark.parametrize(("num_tiles", "width"), [(1, 10), (8, 31), (19, 40), (3, 45)])
def test_neighbours_have_tiles_that_are_near_and_each_is_done_once(num_tiles, width):
    columns = -(-width // 10)
    found = torch.full((num_tiles * columns, 2), -1, dtype=torch.int32)
    note_tiles[(num_tiles * columns,)](found, num_tiles, WIDTH=width, AT_ONCE=4)
    pairs = [tuple(one) for one in found.tolist()]
    assert sorted(pairs) == [(tile, column) for tile in range(num_tiles) for column in range(columns)]
    for first in range(0, len(pairs), 4 * columns):
        assert len({tile for tile, _ in pairs[first : first + 4 * columns]}) <= 4


# Pairs, experts, the first one: blocks of 64, the last of them full of pairs or with a single one, and more than 16.
MANY_PAIRS = [(438, 6, 0), (1125, 31, 0), (320, 3, 2), (129, 1, 1)]
SMALL_BLOCKS = {"FEW_PAIRS": 128, "PAIRS_AT_ONCE": 64}  # a block is sorted, which the interpreter does number by number


@pytest.mark.parametrize(("num_pairs", "num_experts", "first"), MANY_PAIRS)
def test_many_pairs_are_placed_by_blocks_in_the_same_order(
    num_pairs: int, num_experts: int, first: int, monkeypatch: pytest.MonkeyPatch
):
    for name, size in SMALL_BLOCKS.items():
        monkeypatch.setattr(kernel, name, size)
    check_placed(kernel, num_pairs, num_experts, first)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(b_B < block)[:, None]", "(b_B < 0)[:, None]"),
        ("tl.sort(expert_P * BLOCK_P + p_P)", "tl.sort(expert_P * BLOCK_P + BLOCK_P - 1 - p_P)"),
    ],
    ids=["blocks before", "another order"],
)
def test_a_mistake_in_placing_is_found(right: str, wrong: str, tmp_path: Path):
    planted = with_mistake(kernel, right, wrong, tmp_path)
    vars(planted).update(SMALL_BLOCKS, BLOCKS_AT_ONCE=2)
    with pytest.raises(AssertionError):
        check_placed(planted, 132, 3, 2)


def check_placed(module: ModuleType, num_pairs: int, num_experts: int, first: int) -> None:
    generator = torch.Generator().manual_seed(num_pairs)
    chosen = torch.randint(0, num_experts + first + 2, (num_pairs, 1), generator=generator)  # some are of other ranks
    chosen[chosen == first + num_experts // 2] = 0  # an expert without pairs
    order, counts = module.sorted_pairs(chosen, num_experts, first)
    here = chosen[:, 0] - first
    expected = [(here == expert).nonzero()[:, 0] for expert in range(num_experts)]
    assert counts.tolist() == [len(one) for one in expected]
    # Not as lists: pytest would take minutes to show how thousands of numbers differ.
    assert torch.equal(order[: counts.sum()].long(), torch.cat(expected)), "pairs are in another order"


def in_four_bits(num_experts: int, outputs: int, inputs: int, seed: int) -> tuple[FourBits, Tensor]:
    """Random codes with scales around the size of a weight, in the kernel's order, and the floats they stand for."""
    generator = torch.Generator().manual_seed(seed)
    memory = StoredCodes(num_experts, outputs, inputs, torch.device("cpu"))
    memory.codes_EOGB.random_(0, 256, generator=generator)
    memory.scales_EOG.random_(121, 126, generator=generator)
    floats = torch.stack([decoded(*one) for one in zip(memory.codes_EOGB, memory.scales_EOG, strict=True)])
    return memory.arranged(), floats


@pytest.mark.parametrize(
    "num_tokens,num_experts,num_chosen,width,inner",
    [
        (5, 5, 2, 96, 64),  # an odd number of groups, an unrolled loop with a rest
        (70, 2, 1, 64, 96),
        (270, 2, 1, 160, 32),
    ],
)
def test_experts_in_four_bits(num_tokens, num_experts, num_chosen, width, inner):
    x = normal(num_tokens, width, dtype=torch.bfloat16)
    chosen = torch.stack([torch.randperm(num_experts)[:num_chosen] for _ in range(num_tokens)])
    weights = normal(num_tokens, num_chosen, seed=1).softmax(-1).bfloat16()
    gate_up, gate_up_floats = in_four_bits(num_experts, 2 * inner, width, seed=2)
    down, down_floats = in_four_bits(num_experts, width, inner, seed=3)
    biases = [normal(num_experts, size, seed=4, dtype=torch.bfloat16) for size in (2 * inner, width)]
    found = mix_experts(x, weights, chosen, gate_up, down, *biases, "clamped_swish", LIMIT, SLOPE)
    floats = gate_up_floats, down_floats
    expected = by_definition(x, weights, chosen, *floats, *biases, "clamped_swish")
    bound = 4 * rounding(torch.bfloat16)
    torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound * float(expected.abs().max()))


def test_ranks_that_divide_experts_add_up_to_all_of_them():
    x, weights = normal(11, 24), normal(11, 3, seed=1).softmax(-1)
    chosen = torch.stack([torch.randperm(5)[:3] for _ in range(11)])
    gate_up, down = normal(5, 48, 24, seed=2), normal(5, 24, 24, seed=3)
    biases = normal(5, 48, seed=4), normal(5, 24, seed=5)
    together = mix_experts(x, weights, chosen, gate_up, down, *biases, "silu")
    parts = []
    for first, behind in ((0, 3), (3, 5)):
        here = (one[first:behind] for one in (gate_up, down, *biases))
        parts.append(mix_experts(x, weights, chosen, *here, "silu", first_expert=first))
        assert not torch.allclose(parts[-1], together)
    torch.testing.assert_close(sum(parts), together, rtol=1e-5, atol=1e-5)


def test_a_tokens_result_has_the_same_bits_beside_others():
    x, weights = normal(20, 40), normal(20, 2, seed=1).softmax(-1)
    chosen = torch.stack([torch.randperm(6)[:2] for _ in range(20)])
    experts = normal(6, 48, 40, seed=2), normal(6, 40, 24, seed=3), None, None, "silu"
    together = mix_experts(x, weights, chosen, *experts)
    for part in (slice(0, 1), slice(3, 11)):
        assert torch.equal(mix_experts(x[part], weights[part], chosen[part], *experts), together[part])
    assert mix_experts(x[:0], weights[:0], chosen[:0], *experts).shape == (0, 40)


def test_more_pairs_than_a_program_looks_at_together(monkeypatch):
    monkeypatch.setattr(kernel, "PAIRS_AT_ONCE", 16)
    x, weights = normal(31, 16), normal(31, 2, seed=1).softmax(-1)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(31)])
    experts = normal(4, 32, 16, seed=2), normal(4, 16, 16, seed=3), None, None, "silu"
    expected = by_definition(x, weights, chosen, *experts)
    torch.testing.assert_close(mix_experts(x, weights, chosen, *experts).double(), expected, rtol=1e-4, atol=1e-4)


def test_a_layer_that_weighs_inputs_takes_several_experts_for_a_token():
    """Llama 4's: each expert of a token has an input of its own, so the choice is read column by column."""
    router = RouterShape(scoring="sigmoid")
    shape = ExpertsShape(
        num_experts=6, num_chosen=2, expert_size=24, activation="silu", router=router, weighs_inputs=True
    )
    layer = Experts(shape, 40, LocalComm(), torch.device("cpu"), torch.float32)
    for number, one in enumerate(layer.slices("")):
        one.target.copy_(normal(*one.target.shape, seed=number) / 4)
    x = normal(9, 40, seed=99)
    expected = layer(x, None)
    layer.on_gpu = True
    layer.pack(FusedKernels("cpu"))
    torch.testing.assert_close(layer(x, None), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stacked", [False, True])
def test_the_layer_takes_it_and_waits_for_no_value(stacked):
    activation = "clamped_swish" if stacked else "silu"
    shape = ExpertsShape(
        num_experts=6,
        num_chosen=2,
        expert_size=24,
        activation=activation,
        router=RouterShape(bias=stacked),
        shared_size=16 * (not stacked),
        stacked=stacked,
        limit=LIMIT,
        slope=SLOPE,
    )
    layer = Experts(shape, 40, LocalComm(), torch.device("cpu"), torch.float32)
    for number, one in enumerate(layer.slices("")):
        one.target.copy_(normal(*one.target.shape, seed=number) / 4)
    x = normal(9, 40, seed=99)
    expected = layer(x, None)
    layer.on_gpu = True
    with pytest.raises(ConfigError, match="Triton kernels"):
        layer.pack(None)
    layer.pack(FusedKernels("cpu"))
    operations = RecordedOperations()
    with operations:
        found = layer(x, None)
    assert not set(operations.names) & set(WAITING)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def in_float8(num_experts: int, outputs: int, inputs: int, seed: int) -> tuple[EightBits, Tensor]:
    """Weights in float8 with a different scale for each block, and the floats that they stand for."""
    elements = (100 * normal(num_experts, outputs, inputs, seed=seed)).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = 2e-4 * (1 + normal(num_experts, outputs // BLOCK, inputs // BLOCK, seed=seed + 1).abs())
    floats = elements.float() * scales.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    return EightBits(elements, scales), floats


def as_rounded(x_TI: Tensor) -> Tensor:
    """Rows as they are after their rounding to float8, with a scale per 128 numbers."""
    elements_TI, scales_TG = rounded(x_TI, BLOCK)
    return (elements_TI.float() * scales_TG.repeat_interleave(BLOCK, 1))[: len(x_TI)]


@pytest.mark.usefixtures("float8_as_a_gpu_rounds_it")
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen", "width", "inner"),
    [
        (1, 5, 2, 256, 128),
        (9, 4, 2, 128, 384),
        (90, 2, 1, 256, 128),  # tiles for tensor cores
        (270, 2, 1, 128, 256),  # the widest tiles
    ],
)
def test_experts_in_float8(num_tokens: int, num_experts: int, num_chosen: int, width: int, inner: int):
    check_float8(kernel, num_tokens, num_experts, num_chosen, width, inner)


def check_float8(module: ModuleType, num_tokens: int, num_experts: int, num_chosen: int, width: int, inner: int):
    """Inputs of both products are rounded as for other layers in float8, and nothing else is."""
    x = normal(num_tokens, width)
    chosen = torch.stack([torch.randperm(num_experts)[:num_chosen] for _ in range(num_tokens)])
    weights = normal(num_tokens, num_chosen, seed=1).softmax(-1)
    gate_up, gate_up_floats = in_float8(num_experts, 2 * inner, width, seed=2)
    down, down_floats = in_float8(num_experts, width, inner, seed=4)
    found = module.mix_experts(x, weights, chosen, gate_up, down, None, None, "silu")
    expected = torch.zeros(num_tokens, width, dtype=torch.float64)
    for token, row in enumerate(as_rounded(x).double()):
        for weight, expert in zip(weights[token].double(), chosen[token].tolist(), strict=True):
            gate, up = (gate_up_floats[expert].double() @ row).chunk(2)
            gated = as_rounded((F.silu(gate) * up).float()[None])[0]
            expected[token] += weight * (down_floats[expert].double() @ gated.double())
    # A number at a border between two of float8 may fall on either side.
    errors = (found.double() - expected).abs() / expected.abs().amax()
    assert (errors > 1e-5).sum(1).count_nonzero() <= 1, "results of several tokens differ"
    assert errors.max() < 0.02


ONE_SCALE = """row_MI = x + token_M[:, None] * INNER + tl.arange(0, INNER)[None, :]
            _, scale_M = rounded_rows(tl.load(row_MI, mask=live_M[:, None], other=0.0))
            rounded_MC = (x_MC / scale_M[:, None]).to(tl.float8e4nv)"""
FLOAT8_MISTAKES = {
    "scale of the first inputs": ("scales + block * (INNER // 128) + at)", "scales + block * (INNER // 128))"),
    "scale of the first outputs": ("scales + block * (INNER // 128) + at)", "scales + at)"),
    "scale of gates for ups": ("scales, WIDTH // GROUP + block, up_N", "scales, block, up_N"),
    "scales of the first expert": ("scales += expert * (WIDTH // GROUP) * (INNER // GROUP)", "scales += expert * 0"),
    "no scale of weights": ("product_MN * (scale_M * scale)[:, None]", "product_MN * scale_M[:, None]"),
    "no scale of inputs": ("product_MN * (scale_M * scale)[:, None]", "product_MN * scale"),
    "a scale for all rows": (
        "tl.max(tl.abs(x_MC), 1), SMALLEST)",
        "tl.max(tl.abs(x_MC)) + 0 * tl.max(x_MC, 1), SMALLEST)",
    ),
    "a scale for all inputs of a row": ("rounded_MC, scale_M = rounded_rows(x_MC)", ONE_SCALE),
    "weights of another expert": ("row = expert.to(tl.int64) * WIDTH", "row = (expert.to(tl.int64) ^ 1) * WIDTH"),
    "a pair of another token": (
        "place_M, mask=live_M, other=0) // NUM_CHOSEN",
        "stop - 1) // NUM_CHOSEN + place_M * 0",
    ),
    "weight of another pair": ("tl.load(weights + pair_M,", "tl.load(weights + place_M,"),
}


@pytest.mark.usefixtures("float8_as_a_gpu_rounds_it")
@pytest.mark.parametrize("mistake", FLOAT8_MISTAKES)
def test_a_mistake_with_experts_in_float8_is_found(mistake: str, tmp_path: Path):
    planted = with_mistake(kernel, *FLOAT8_MISTAKES[mistake], tmp_path)
    with pytest.raises(AssertionError):
        check_float8(planted, 5, 2, 2, 256, 128)


@pytest.mark.usefixtures("float8_as_a_gpu_rounds_it")
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("x_scales + token_M + at * x_stride", "x_scales + token_M"),
        ("x_scales + token_M + at * x_stride", "x_scales + place_M + at * x_stride"),
        ("gated_scales + place_M + at * gated_stride", "gated_scales + place_M"),
    ],
    ids=["scale of the first inputs", "scale of another token", "scale of the first gated numbers"],
)
def test_a_mistake_with_inputs_that_were_rounded_before_is_found(right: str, wrong: str, tmp_path: Path):
    planted = with_mistake(kernel, right, wrong, tmp_path)
    with pytest.raises(AssertionError):
        check_float8(planted, 70, 2, 1, 256, 256)


def check_damage(module: ModuleType) -> None:
    """An input of a token that is no number, behind which none of its outputs is a finite one."""
    (gate_up, _), (down, _) = in_float8(1, 256, 128, seed=2), in_float8(1, 128, 128, seed=4)
    x = normal(4, 128)
    for row, damage in enumerate((torch.nan, torch.inf, -torch.inf)):
        x[row, 30 + row] = damage
    found = module.mix_experts(
        x, torch.ones(4, 1), torch.zeros(4, 1, dtype=torch.int64), gate_up, down, None, None, "silu"
    )
    assert found[0].isnan().all()
    assert not found[1:3].isfinite().any()
    assert found[3].isfinite().all(), "a token without damage has it"


@pytest.mark.usefixtures("float8_as_a_gpu_rounds_it", "nan_as_a_gpu_clamps_it")
def test_what_is_no_number_stays_so_behind_experts_in_float8(tmp_path: Path):
    check_damage(kernel)
    planted = with_mistake(kernel, ", -LARGEST, LARGEST, tl.PropagateNan.ALL)", ", -LARGEST, LARGEST)", tmp_path)
    with pytest.raises(AssertionError):
        check_damage(planted)


@pytest.mark.usefixtures("float8_as_a_gpu_rounds_it")
@pytest.mark.parametrize(("ranks", "divided"), [(1, False), (2, False), (2, True)])
def test_a_layer_reads_float8_as_a_file_has_it_and_gives_what_its_floats_give(ranks, divided, tmp_path):
    tensors = {"mlp.gate.weight": normal(5, 128, dtype=torch.bfloat16)}
    for number in range(5):
        for name, outputs, inputs in (("gate_proj", 256, 128), ("up_proj", 256, 128), ("down_proj", 128, 256)):
            blocks, _ = in_float8(1, outputs, inputs, seed=10 * number + outputs + len(name))
            prefix = f"mlp.experts.{number}.{name}.weight"
            tensors |= {prefix: blocks.elements_EOI[0], f"{prefix}_scale_inv": 30 * blocks.scales_EBC[0]}
    save_file(tensors, tmp_path / "model.safetensors")
    stored = read_shards(tmp_path)
    quantization = Quantization(method="fp8", kind="float", bits=8, block=(BLOCK, BLOCK))
    x, results = normal(9, 128, seed=99, dtype=torch.bfloat16), []
    for float8 in (False, True):
        reader = QuantizedReader(stored, quantization, float8)
        shape = ExpertsShape(
            num_experts=5, num_chosen=2, expert_size=256, activation="silu", router=RouterShape(), float8=float8,
            divided=divided,
        )  # fmt: skip
        total = torch.zeros(9, 128, dtype=torch.float64)
        for rank in range(ranks):
            layer = Experts(shape, 128, Unconnected(rank, ranks), torch.device("cpu"), torch.bfloat16)
            slices = list(layer.slices(""))
            assert {one.source for one in slices} == {*reader.tensors}, "every tensor is read"
            for one in slices:
                assert reader.tensors[one.source].shape == one.shape
                if one.length:
                    part = reader.part(one.source, one.dim, one.start, one.length)
                    one.target.narrow(one.dim, 0, one.length).copy_(part)
            layer.on_gpu = True
            layer.pack(FusedKernels("cpu"))
            total += layer(x, None)
        results.append(total)
    floats, kept = results
    assert floats.abs().max() > 1
    torch.testing.assert_close(kept, floats, rtol=0.05, atol=0.05 * float(floats.abs().max()))


@pytest.mark.parametrize(("ranks", "divided"), [(1, False), (3, False), (2, True)])
def test_a_layer_reads_the_codes_of_a_file_and_gives_what_their_floats_give(ranks, divided, tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, outputs, inputs in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
        codes = torch.randint(0, 256, (5, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(119, 123, codes.shape[:3], generator=generator, dtype=torch.uint8)
        tensors |= {f"mlp.experts.{name}_blocks": codes, f"mlp.experts.{name}_scales": scales}
        tensors[f"mlp.experts.{name}_bias"] = normal(5, outputs, seed=outputs, dtype=torch.bfloat16)
    tensors["mlp.router.weight"] = normal(5, 64, dtype=torch.bfloat16)
    tensors["mlp.router.bias"] = normal(5, dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    stored = read_shards(tmp_path)
    x, results = normal(9, 64, seed=99, dtype=torch.bfloat16), []
    for four_bits, reader in ((False, MXFP4Reader(stored)), (True, CodesReader(stored))):
        shape = ExpertsShape(
            num_experts=5, num_chosen=2, expert_size=96, activation="clamped_swish", limit=LIMIT, slope=SLOPE,
            router=RouterShape(name="router", bias=True), stacked=True, upright=True, four_bits=four_bits,
            divided=divided,
        )  # fmt: skip
        total = torch.zeros(9, 64, dtype=torch.float64)
        for rank in range(ranks):
            layer = Experts(shape, 64, Unconnected(rank, ranks), torch.device("cpu"), torch.bfloat16)
            for one in layer.slices(""):
                if one.length:
                    part = reader.part(one.source, one.dim, one.start, one.length, one.member)
                    one.target.narrow(one.dim, 0, one.length).copy_(part)
            layer.on_gpu = True
            layer.pack(FusedKernels("cpu"))
            total += layer(x, None)
        results.append(total)
    floats, codes = results
    assert floats.abs().max() > 1
    torch.testing.assert_close(codes, floats, rtol=0.02, atol=0.02 * float(floats.abs().max()))


def test_the_norm_behind_a_layer_adds_what_its_experts_give():
    """It has the bits of the sum by itself, and of the norm behind that."""
    shape = ExpertsShape(num_experts=6, num_chosen=3, expert_size=24, activation="silu", router=RouterShape())
    layers = [Experts(shape, 40, LocalComm(), torch.device("cpu"), torch.bfloat16) for _ in range(2)]
    kernels = FusedKernels("cpu")
    for layer in layers:
        for number, one in enumerate(layer.slices("")):
            one.target.copy_(normal(*one.target.shape, seed=number) / 4)
        layer.on_gpu = True
        layer.pack(kernels)
    norm = RMSNorm(40, 1e-6, torch.device("cpu"), torch.bfloat16)
    norm.weight.copy_(normal(40, seed=8))
    norm.pack(kernels)
    x, stream = normal(7, 40, seed=99, dtype=torch.bfloat16), normal(7, 40, seed=98, dtype=torch.bfloat16)
    assert layers[1].leave_parts()
    parts = layers[1](x, kernels)
    assert parts.shape == (7, 3, 40)
    streams = stream.clone(), stream.clone(), stream.clone()
    joined = PartsNorm(norm).added(streams[0], parts, kernels)
    total = sum(parts.float().unbind(1), torch.zeros(7, 40))
    alone = norm.added(streams[1], (total.view(torch.int32) & -65536).view(torch.float32).bfloat16(), kernels)
    assert torch.equal(joined, alone)
    assert torch.equal(streams[0], streams[1])
    torch.testing.assert_close(joined, norm.added(streams[2], layers[0](x, kernels), kernels), rtol=0.02, atol=0.02)
    torch.testing.assert_close(joined, PartsNorm(norm).added(stream.clone(), parts, None), rtol=0.02, atol=0.02)


def test_experts_beside_others_add_by_themselves():
    shape = ExpertsShape(
        num_experts=4, num_chosen=2, expert_size=24, activation="silu", router=RouterShape(), shared_size=16
    )
    layer = Experts(shape, 40, LocalComm(), torch.device("cpu"), torch.float32)
    layer.on_gpu = True
    layer.pack(FusedKernels("cpu"))
    assert not layer.leave_parts()
    assert layer(normal(3, 40), None).shape == (3, 40)
