"""Products with weights in 4 bits beside the floats that they stand for, and their way from a file to a layer."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from engine.checkpoints.checkpoint import resolve_checkpoint
from engine.kernels import four_bit_products
from engine.kernels.blocks import Format
from engine.kernels.four_bit_products import MOST_ROWS, Codes, FourBitWeight, arranged, multiply_four_bits
from engine.layers.packing import Linears, StoredRows
from engine.models.decoder import Decoder
from engine.models.loader import load_model
from engine.plugins.comm.local import LocalComm
from engine.plugins.declaration import read_declaration
from engine.plugins.families import read_model
from engine.plugins.hookspecs import LinearContext
from engine.plugins.linear.triton_blocks import KeptBlocks, callboard_linear
from engine.plugins.testing.linear import check_linear
from engine.types.errors import WeightsError
from tests.formats import stored
from tests.kernels.interpreted.test_layers import normal
from tests.kernels.stored_blocks import INT4, int4_floats, random_rows

CPU = torch.device("cpu")
CUT = 2**-7  # the interpreter cuts bfloat16 off where a GPU rounds


def rows_of(kind: Format, outputs: int, inputs: int, seed: int = 0) -> StoredRows:
    return random_rows(Random(seed), kind, outputs, inputs)


def expected(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize("kind", INT4)
@pytest.mark.parametrize(("num_rows", "outputs", "groups"), [(1, 64, 1), (3, 70, 5), (17, 130, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_rows(kind: Format, num_rows: int, outputs: int, groups: int, dtype: torch.dtype) -> None:
    width = int(kind.name.removeprefix("HALF").removeprefix("UPPER"))
    rows = rows_of(kind, outputs, groups * width)
    x, bias = normal(num_rows, rows.inputs, dtype=dtype), normal(outputs, seed=1, dtype=dtype)
    weight = FourBitWeight([rows], CPU)
    for given in (bias, None):
        found, wanted = weight(x, given), expected(x, int4_floats(rows), given)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, rtol=CUT, atol=2e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("programs", [1, 4, 64])
def test_shares_of_the_inputs_add_up_and_leave_no_count(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    monkeypatch.setattr(four_bit_products, "PROGRAMS", programs)
    rows = rows_of(Format.HALF32, 100, 32 * 13)
    codes = Codes(*arranged(rows, CPU), torch.zeros(2, dtype=torch.int32), rows.inputs)
    x = normal(5, rows.inputs, dtype=torch.bfloat16)
    wanted = expected(x, int4_floats(rows), None)
    for _ in range(2):
        found = multiply_four_bits(x, codes, None).double()
        torch.testing.assert_close(found, wanted, rtol=CUT, atol=2e-5 * float(wanted.abs().max()))
        assert not codes.arrived.any()


@pytest.mark.parametrize("kind", INT4)
def test_floats_are_those_of_the_file(kind: Format) -> None:
    rows = rows_of(kind, 70, 384)
    found = FourBitWeight([rows], CPU).floats(torch.float32)
    assert torch.equal(found, int4_floats(rows))


def test_many_rows_are_multiplied_by_floats_and_none_by_nothing() -> None:
    rows = rows_of(Format.UPPER64, 70, 128)
    weight = FourBitWeight([rows], CPU)
    x = normal(MOST_ROWS + 1, 128, dtype=torch.bfloat16)
    wanted = torch.nn.functional.linear(x, weight.floats(torch.bfloat16))
    assert torch.equal(weight(x, None), wanted)
    assert weight(x[:0], None).shape == (0, 70)


def test_a_weight_has_the_bytes_of_its_file() -> None:
    rows = rows_of(Format.HALF128, 256, 1024)
    assert FourBitWeight([rows], CPU).nbytes == rows.blocks.nbytes + 4 * 4


def test_the_kit_finds_nothing() -> None:
    declares = read_declaration("engine.plugins.linear.triton_blocks")
    assert declares is not None
    check_linear(callboard_linear, declares)


def new_kernel() -> KeptBlocks:
    return callboard_linear(LinearContext("cuda", "bfloat16", "none", stored_formats=("int4",)))


def test_a_merged_weight_is_kept_and_one_with_a_part_of_floats_becomes_floats() -> None:
    kernel, parts = new_kernel(), [rows_of(Format.HALF32, outputs, 64, outputs) for outputs in (40, 30)]
    weight = torch.full((70, 64), torch.nan, dtype=torch.bfloat16)
    assert kernel.keep(weight[:40], parts[0])
    assert not kernel.keeps(weight)
    assert kernel.keep(weight[40:], parts[1])
    assert kernel.keeps(weight)
    packed = kernel.pack(weight)
    assert packed is not None
    x, floats = normal(2, 64, dtype=torch.bfloat16), torch.cat([int4_floats(one) for one in parts])
    wanted = expected(x, floats, None)
    torch.testing.assert_close(packed(x, None).double(), wanted, rtol=CUT, atol=2e-5 * float(wanted.abs().max()))
    weight[:40] = 1.0
    assert kernel.keep(weight[40:], parts[1])
    assert kernel.pack(weight) is None
    assert torch.equal(weight[:40], torch.ones(40, 64).bfloat16())
    torch.testing.assert_close(weight[40:].float(), int4_floats(parts[1]), rtol=CUT, atol=0)


def test_parts_of_two_formats_become_floats() -> None:
    kernel, parts = new_kernel(), [rows_of(kind, 40, 64) for kind in (Format.HALF32, Format.UPPER64)]
    weight = torch.empty((80, 64), dtype=torch.bfloat16)
    for first, one in zip((0, 40), parts, strict=True):
        assert kernel.keep(weight[first : first + 40], one)
    assert kernel.pack(weight) is None
    torch.testing.assert_close(weight.float(), torch.cat([int4_floats(one) for one in parts]), rtol=CUT, atol=0)


def test_other_formats_are_left_to_be_read_as_floats() -> None:
    assert not new_kernel().keep(torch.empty(4, 32), rows_of(Format.Q4_0, 4, 32))


def test_a_scale_that_is_no_number_names_its_tensor() -> None:
    rows = rows_of(Format.HALF32, 4, 64)
    rows.blocks[1, :2] = 255
    with pytest.raises(WeightsError, match="random contains NaN"):
        FourBitWeight([rows], CPU)


@pytest.mark.parametrize("variant", ["llama-tied", "llama"])
@torch.inference_mode()
def test_a_model_whose_embedding_is_in_four_bits_too(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reads no rows, so the embedding becomes floats."""
    monkeypatch.setattr(stored, "_groups", lambda inputs, size=32: torch.arange(inputs) // 32)
    monkeypatch.setattr(stored, "LINEARS", (*stored.LINEARS, "embed_tokens"))
    config = stored.compressed("pack-quantized", **stored.INT4 | {"group_size": 32})
    directory, reference = stored.write(tmp_path, stored.packed(), config, variant=variant)
    kernel, spec = new_kernel(), read_model(resolve_checkpoint(str(directory), ""))
    linears = Linears(kernel, kernel)
    model = load_model(spec, LocalComm(), CPU, torch.bfloat16, "safetensors", 0, False, linears)
    assert isinstance(model, Decoder)
    assert all(isinstance(one.packed, FourBitWeight) for layer in model.layers for one in layer.linears)
    wanted = reference.get_input_embeddings().weight[:5]
    torch.testing.assert_close(model.embedding.embed(torch.arange(5)).float(), wanted.bfloat16().float())


def test_one_output_of_one_group() -> None:
    rows = rows_of(Format.HALF32, 1, 32)
    twice = replace(rows, blocks=torch.cat([rows.blocks, rows.blocks]))
    assert torch.equal(FourBitWeight([rows], CPU).floats(torch.float32), int4_floats(twice)[:1])
