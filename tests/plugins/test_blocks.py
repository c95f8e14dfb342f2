"""A model from a GGUF file whose weights stay in the file's blocks, from the loader to its tokens."""

import logging
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from callboard import LLM, SamplingParams
from engine.checkpoints.checkpoint import resolve_checkpoint
from engine.config import Config
from engine.formats import integers
from engine.formats.opening import open_reader
from engine.kernels.blocks import Parts, StoredWeight, block_products
from engine.kernels.panels import PanelWeight
from engine.layers.packing import Linears, StoredRows
from engine.models.decoder import Decoder
from engine.models.loader import load_model
from engine.plugins.comm.local import LocalComm
from engine.plugins.families import read_model
from engine.plugins.hookspecs import LinearContext
from engine.plugins.linear.blocks import StoredBlocks, callboard_linear
from engine.plugins.manager import Plugins
from engine.plugins.testing.steps import Driver
from engine.startup.linears import choose_linears
from tests.formats import stored
from tests.models.checkpoints import SIZES, build, reference_logits
from tests.own_cache import use_own_cache

gguf = pytest.importorskip("gguf", reason="pip install 'callboard[gguf]'")
from tests.formats.test_gguf import write  # noqa: E402

pytestmark = pytest.mark.skipif(block_products() is None, reason="there is no C compiler, or no AVX2")
CPU = torch.device("cpu")
PROMPT = [5, 17, 200, 3, 99, 41, 7]
SUPER = ("Q4_K", "Q5_K", "Q6_K")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_cache(monkeypatch, tmp_path / "cache")


def kernel_for(*formats: str, quantization: str = "none") -> StoredBlocks:
    return callboard_linear(LinearContext("cpu", "float32", quantization, stored_formats=formats))


def loaded(path: Path, kernel: StoredBlocks) -> Decoder:
    spec = read_model(resolve_checkpoint(str(path), ""))
    model = load_model(spec, LocalComm(), CPU, torch.float32, "safetensors", 0, False, Linears(kernel, kernel.head))
    assert isinstance(model, Decoder)
    return model


def large() -> PreTrainedModel:
    """One whose rows have whole blocks of 256 elements."""
    torch.manual_seed(1)
    sizes = SIZES | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="eager")).eval()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *SUPER])
@torch.inference_mode()
def test_logits_are_those_of_the_file_and_no_weight_is_floats(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    reference = write(path, large() if kind in SUPER else build("llama"), kind)
    model = loaded(path, kernel_for(kind))
    expected = reference_logits(reference, PROMPT)
    torch.testing.assert_close(Driver(model).step({"a": PROMPT})["a"], expected, rtol=1e-4, atol=1e-4)
    linears = [model.embedding, model.head, *(one for layer in model.layers for one in layer.linears)]
    assert all(isinstance(one.packed, StoredWeight) and not hasattr(one, "weight") for one in linears)
    assert model.weight_bytes == sum(one.nbytes for one in linears) + sum(
        one.numel() * 4 for one in reference.parameters() if one.dim() == 1
    )


@pytest.mark.parametrize("variant", ["llama-tied", "qwen2", "qwen3"])
@torch.inference_mode()
def test_biases_norms_and_tied_tables_are_as_they_were(variant: str, tmp_path: Path) -> None:
    reference = write(tmp_path / "tiny.gguf", build(variant), "Q4_0")
    model = loaded(tmp_path / "tiny.gguf", kernel_for("Q4_0"))
    expected = reference_logits(reference, PROMPT)
    torch.testing.assert_close(Driver(model).step({"a": PROMPT})["a"], expected, rtol=1e-4, atol=1e-4)
    assert (model.head is model.embedding) == reference.config.tie_word_embeddings


@torch.inference_mode()
def test_rounded_inputs_change_logits_by_little_and_those_of_the_head_have_more_bits(tmp_path: Path) -> None:
    # With weights of 8 bits, inputs have 7 on a CPU whose products add in 16 bits, and the error is twice as large.
    reference = write(tmp_path / "tiny.gguf", build("llama-tied"), "Q4_0")
    kernel = kernel_for("Q4_0", quantization="int8")
    model = loaded(tmp_path / "tiny.gguf", kernel)
    expected = reference_logits(reference, PROMPT)
    found = Driver(model).step({"a": PROMPT})["a"]
    error = float((found - expected).norm() / expected.norm())
    assert 1e-5 < error < 0.06
    assert isinstance(model.head.packed, StoredWeight)
    assert model.head.packed._blocks[0].parts == Parts.FINE
    assert model.layers[0].linears[0].packed._blocks[0].parts == Parts.ROUNDED


@torch.inference_mode()
def test_a_weight_of_which_a_part_is_floats_becomes_floats(tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", build("llama"), "Q4_0")
    reader = open_reader(read_model(resolve_checkpoint(str(tmp_path / "tiny.gguf"), "")))
    kernel, weight_OI = kernel_for("Q4_0"), torch.full((64 + 7, 64), torch.nan)
    rows = reader.rows("model.layers.0.self_attn.q_proj.weight", 0, 0, 64)
    assert rows is not None
    assert kernel.keep(weight_OI[7:], rows)
    assert not kernel.keeps(weight_OI)
    weight_OI[:7] = 1.0
    packed = kernel.pack(weight_OI)
    assert isinstance(packed, PanelWeight)
    expected_OI = torch.cat([torch.ones(7, 64), reader.part("model.layers.0.self_attn.q_proj.weight", 0, 0, 64)])
    torch.testing.assert_close(packed(torch.eye(64), None), expected_OI.T)
    reader.close()


@torch.inference_mode()
def test_experts_in_four_bits_are_kept_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their weights are parts of one memory."""
    monkeypatch.setattr(stored, "_groups", lambda inputs, size=32: torch.arange(inputs) // 32)
    directory, reference = stored.write(tmp_path, stored.awq, stored.AWQ | {"group_size": 32}, variant="mixtral")
    model = loaded(directory, kernel_for("int4"))
    torch.testing.assert_close(
        Driver(model).step({"a": PROMPT})["a"], reference_logits(reference, PROMPT), rtol=1e-4, atol=1e-4
    )
    assert all(isinstance(one.packed, StoredWeight) for layer in model.layers for one in layer.linears)


def test_rows_are_read_in_parts_as_the_model_orders_them_and_not_within_a_row(tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", build("llama"), "Q5_1")
    reader = open_reader(read_model(resolve_checkpoint(str(tmp_path / "tiny.gguf"), "")))
    functions = block_products()
    assert functions is not None
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"):
        weight = f"model.layers.1.{name}.weight"
        rows = reader.rows(weight, 0, 16, 16)
        assert rows is not None
        found_OI = StoredWeight(functions, [rows], Parts.EXACT).rows(torch.arange(16))
        assert torch.equal(found_OI, reader.part(weight, 0, 16, 16))
    assert reader.rows("model.layers.1.self_attn.o_proj.weight", 1, 0, 64) is not None
    assert reader.rows("model.layers.1.self_attn.o_proj.weight", 1, 0, 32) is None
    assert reader.rows("model.norm.weight", 0, 0, 64) is None
    reader.close()


def test_a_file_in_other_blocks_is_left_to_other_kernels(tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", large(), "Q3_K")
    spec = read_model(resolve_checkpoint(str(tmp_path / "tiny.gguf"), ""))
    plan = Decoder(spec.shape, LocalComm(), torch.device("meta"), torch.float32)
    chosen = choose_linears(Config(), spec, Plugins({"linear": "auto"}), plan, CPU)
    assert not isinstance(chosen.layers, StoredBlocks)


INT4_FORMATS = {
    "awq": (stored.awq, stored.AWQ),
    "gptq": (stored.gptq(), stored.GPTQ),
    "gptq-v2": (stored.gptq(offset=0), stored.GPTQ | {"checkpoint_format": "gptq_v2"}),
    "packed": (stored.packed(), stored.compressed("pack-quantized", **stored.INT4 | {"group_size": 32})),
    "packed-zeros": (
        stored.packed(symmetric=False),
        stored.compressed("pack-quantized", **stored.INT4 | {"group_size": 32, "symmetric": False}),
    ),
    "gptq-order": (stored.gptq(act_order=True), stored.GPTQ | {"desc_act": True}),
}


@pytest.mark.parametrize("name", INT4_FORMATS)
@torch.inference_mode()
def test_integers_of_4_bits_in_safetensors_files_are_kept_unless_their_groups_are_not_in_order(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "_groups", lambda inputs, size=32: torch.arange(inputs) // 32)
    store, config = INT4_FORMATS[name]
    config = config | ({"group_size": 32} if "group_size" in config else {})
    directory, reference = stored.write(tmp_path, store, config)
    model = loaded(directory, kernel_for("int4"))
    expected = reference_logits(reference, PROMPT)
    torch.testing.assert_close(Driver(model).step({"a": PROMPT})["a"], expected, rtol=1e-4, atol=1e-4)
    linears = [one for layer in model.layers for one in layer.linears]
    assert all(isinstance(one.packed, StoredWeight) for one in linears) == (name != "gptq-order")
    assert isinstance(model.head.packed, PanelWeight)


def test_scales_in_bfloat16_are_kept_to_the_bit() -> None:
    functions = block_products()
    assert functions is not None
    weight_OI, scales_OG = torch.randint(0, 16, (5, 128), dtype=torch.int32), torch.randn(5, 2).bfloat16()
    zeros_OG = torch.randint(0, 17, (5, 2), dtype=torch.int32)
    rows = StoredRows("random", "UPPER64", integers.stored(weight_OI, scales_OG, zeros_OG, (1, 64), None), 128)
    found_OI = StoredWeight(functions, [rows], Parts.EXACT).rows(torch.arange(5))
    assert torch.equal(found_OI, integers.scaled(weight_OI, scales_OG, zeros_OG, (1, 64)))


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_tokens_are_those_of_the_floats(numerics: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, build("qwen2"), "Q4_1", tokenizer=True)
    answers, wanted = {}, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    for linear in ("auto", "panels"):
        caplog.clear()
        config = {"kv": {"num_pages": 64}, "plugins": {"linear": linear}, "model": {"numerics": numerics}}
        with caplog.at_level(logging.INFO), LLM(str(path), progress=False, config=config) as llm:
            answers[linear] = [one.token_ids for one in llm.generate([PROMPT, PROMPT[2:], [9]], wanted)]
        assert f"linear.{'blocks' if linear == 'auto' else 'panels'} for float32 weights" in caplog.text
    assert answers["auto"] == answers["panels"]
