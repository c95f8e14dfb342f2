"""The MXFP4 reader gives transformers' numbers for gpt-oss as it is published, one expert at a time."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssForCausalLM, Mxfp4Config

from callboard import LLM, SamplingParams
from engine.checkpoints.checkpoint import ModelSpec
from engine.formats.blocks import decode
from engine.formats.mxfp4 import POSITIVE, decoded
from engine.formats.opening import open_reader
from engine.kernels.blocks import block_products
from engine.layers.experts import Experts, Stack
from engine.layers.packing import Linears
from engine.models.loader import load_model
from engine.plugins.comm.local import LocalComm
from engine.plugins.families import read_model
from engine.plugins.hookspecs import LinearContext
from engine.plugins.linear.blocks import callboard_linear
from engine.plugins.testing.steps import Driver
from engine.plugins.testing.threads import on_ranks
from engine.types.errors import WeightsError
from tests.models.checkpoints import build
from tests.models.conftest import load, onednn_linears
from tests.models.published import PROMPT, assert_same, write

QUANTIZATION = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
    "quant_method": "mxfp4",
}  # fmt: skip
BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"
SCALES = "model.layers.1.mlp.experts.down_proj_scales"


def stored(stack_EIO: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and scales of the nearest numbers, packed as the format's paper says."""
    groups = stack_EIO.mT.unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor() - 2
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled.abs()[..., None] - torch.tensor(POSITIVE)).abs().argmin(-1) + 8 * (scaled < 0)
    codes = codes.to(torch.uint8).unflatten(-1, (-1, 2))
    return codes[..., 0] | codes[..., 1] << 4, (exponents + 127).to(torch.uint8)


def in_four_bits(spec: ModelSpec) -> ModelSpec:
    return replace(spec, shape=spec.shape.with_experts(four_bits=True))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build("gpt-oss")
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = stored(tensor)
        else:
            tensors[name] = tensor.bfloat16()
    config: dict[str, Any] = model.config.to_dict() | {"torch_dtype": "bfloat16", "dtype": None}
    # The older spelling of rotary settings, as in the published file.
    rotary = config.pop("rope_parameters")
    config |= {"rope_theta": rotary.pop("rope_theta"), "rope_scaling": rotary, "quantization_config": QUANTIZATION}
    config["architectures"] = ["GptOssForCausalLM"]
    return write(tmp_path_factory.mktemp("mxfp4"), config, tensors)


def test_the_published_layout_gives_the_tokens_of_transformers(published: Path) -> None:
    reference = GptOssForCausalLM.from_pretrained(
        published,
        quantization_config=Mxfp4Config(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()
    assert_same(published, reference)


def test_every_code_stands_for_its_number() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = codes | codes.flip(0) << 4
    expected = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for exponent in (-127, -3, 0, 5, 127):
        scale = torch.tensor([[exponent + 127]], dtype=torch.uint8)
        got = decoded(blocks.view(1, 1, 16), scale)[0]
        assert (got[0::2] == expected * 2.0**exponent).all()
        assert (got[1::2] == expected.flip(0) * 2.0**exponent).all()


def test_ranks_read_their_parts(published: Path) -> None:
    spec = read_model(published)
    expected = Driver(load(spec)).step({"a": PROMPT})["a"]
    for got in on_ranks(2, lambda comm: Driver(load(spec, comm=comm)).step({"a": PROMPT})["a"]):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(block_products() is None, reason="there is no C compiler, or no AVX2")
def test_experts_stay_as_they_are_stored_on_a_cpu(published: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers, wanted = {}, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    for linear in ("auto", "panels"):
        caplog.clear()
        config = {"kv": {"num_pages": 64}, "plugins": {"linear": linear}, "model": {"tokenizer": "none"}}
        with caplog.at_level(logging.INFO), LLM(str(published), progress=False, config=config) as llm:
            answers[linear] = [one.token_ids for one in llm.generate([PROMPT, PROMPT[2:], [9]], wanted)]
        kept = "stored as mxfp4 (float4) with a scale per 32 inputs, kept so" in caplog.text
        assert kept == (linear == "auto")
    assert answers["auto"] == answers["panels"]


@pytest.mark.skipif(block_products() is None, reason="there is no C compiler, or no AVX2")
@torch.inference_mode()
def test_kept_experts_take_the_bytes_of_the_file(published: Path) -> None:
    spec = read_model(published)
    kernel = callboard_linear(LinearContext("cpu", "float32", "none", stored_formats=spec.stored_formats))
    model, floats = load(spec, linears=Linears(kernel, kernel.head)), load(spec)
    reader = open_reader(spec)
    for number, (layer, plain) in enumerate(zip(model.layers, floats.layers, strict=True)):
        assert isinstance(layer.mlp, Experts)
        assert isinstance(plain.mlp, Experts)
        stored = sum(reader.tensors[f"model.layers.{number}.mlp.{stack}"].num_bytes for stack in layer.mlp.shape.stacks)
        assert stored <= sum(one.nbytes for one in layer.mlp.linears) <= stored * 1.4  # outputs fill panels of 64
        x_TD = torch.randn(9, spec.shape.hidden_size)
        torch.testing.assert_close(layer.mlp(x_TD, None), plain.mlp(x_TD, None), rtol=1e-4, atol=1e-5)
    reader.close()


def test_ranks_read_their_rows_in_blocks(published: Path) -> None:
    reader = open_reader(read_model(published))
    name = BLOCKS.removesuffix("_blocks")
    for dim, start, length in ((0, 7, 20), (1, 0, 96), (1, 32, 64)):
        rows = reader.rows(name, dim, start, length, 3)
        assert rows is not None
        assert rows.inputs == (length if dim else 96)
        assert torch.equal(decode(rows.blocks, rows.format), reader.part(name, dim, start, length, 3))
    assert reader.rows(name, 1, 48, 48, 3) is None
    assert reader.rows("model.norm.weight", 0, 0, 64) is None
    reader.close()


def test_a_stack_of_floats_beside_others_in_four_bits_is_read(published: Path, tmp_path: Path) -> None:
    def widen(tensors: dict[str, Tensor]) -> None:
        stack = decoded(*(tensors.pop(name).flatten(0, 1) for name in (BLOCKS, SCALES)))
        tensors[BLOCKS.removesuffix("_blocks")] = stack.unflatten(0, (5, -1)).mT.contiguous()

    damaged_copy(published, tmp_path, widen)
    of_both, of_codes = (Driver(load(read_model(one))).step({"a": PROMPT})["a"] for one in (tmp_path, published))
    assert torch.equal(of_both, of_codes)


def without_scales(tensors: dict[str, Tensor]) -> None:
    del tensors[SCALES]


def with_other_groups(tensors: dict[str, Tensor]) -> None:
    tensors[SCALES] = tensors[SCALES][..., :1].contiguous()


def with_nan(tensors: dict[str, Tensor]) -> None:
    tensors[SCALES][0, 0, 0] = 255


def damaged_copy(published: Path, folder: Path, damage: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(published / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((published / "config.json").read_text())


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without_scales, f"{BLOCKS}' needs the tensor '{SCALES}', which is missing"),
        (with_other_groups, r"are \[5, 64, 3, 16\] and U8 \[5, 64, 1\], expected"),
        (with_nan, f"{SCALES}' contains NaN; the file is damaged"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    damage: Callable[[dict[str, Tensor]], None], said: str, published: Path, tmp_path: Path
) -> None:
    damaged_copy(published, tmp_path, damage)
    with pytest.raises(WeightsError, match=said):
        load(read_model(tmp_path))


def with_a_large_scale(tensors: dict[str, Tensor]) -> None:
    tensors[SCALES][0, 0, 0] = 129


def without_codes(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.endswith(("_blocks", "_scales"))]:
        del tensors[name]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without_scales, f"tensor '{SCALES}' of shape .* is missing"),
        (with_other_groups, rf"'{SCALES}' has shape \[5, 64, 1\], config.json expects \[5, 64, 3\]"),
        (with_nan, f"'{SCALES}' contains NaN; the file is damaged"),
        (with_a_large_scale, f"'{SCALES}' has a scale of 129, and the kernel takes 128 at most; set"),
        (without_codes, 'no tensor is in MXFP4, though config.json says so; set model.quantization="none"'),
    ],
)
def test_codes_that_a_kernel_cannot_read_are_named(
    damage: Callable[[dict[str, Tensor]], None], said: str, published: Path, tmp_path: Path
) -> None:
    damaged_copy(published, tmp_path, damage)
    with pytest.raises(WeightsError, match=said):
        load(in_four_bits(read_model(tmp_path)))


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_codes_are_loaded_as_they_are_stored(
    load_format: Literal["safetensors", "dummy"], published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers: list[list[Stack]] = []
    monkeypatch.setattr(Experts, "pack", lambda self, kernels: layers.append(self._stacks))
    spec = in_four_bits(read_model(published))
    linears = onednn_linears(torch.bfloat16)
    where = torch.device("cpu"), torch.bfloat16, load_format, 0
    load_model(spec, LocalComm(), *where, linears=linears, progress=False)
    memory = layers[1][1].codes
    assert memory is not None
    if load_format == "dummy":
        assert memory.scales_EOG.unique().tolist() == [120]
        assert len(memory.codes_EOGB.unique()) > 200
    else:
        tensors = load_file(published / "model.safetensors")
        assert torch.equal(memory.codes_EOGB, tensors[BLOCKS])
        assert torch.equal(memory.scales_EOG, tensors[SCALES])


def test_a_stack_counts_with_its_stored_bytes(published: Path) -> None:
    reader = open_reader(read_model(published))
    stack = reader.tensors[BLOCKS.removesuffix("_blocks")]
    assert stack.shape == (5, 64, 96)
    assert stack.num_bytes == 5 * 96 * 64 * 17 // 32
