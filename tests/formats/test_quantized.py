"""Quantized checkpoints compute what transformers computes with the weights that their integers stand for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from callboard import LLM, SamplingParams
from engine.checkpoints.shape import DecoderShape
from engine.formats import quantized
from engine.formats.integers import scaled
from engine.formats.opening import open_reader
from engine.kernels.float8_blocks import in_blocks
from engine.models import loader
from engine.plugins.comm.local import LocalComm
from engine.plugins.families import read_model
from engine.plugins.linear.onednn import onednn_linears
from engine.plugins.testing.steps import Driver
from engine.types.errors import ConfigError, WeightsError
from tests.formats.stored import (
    AWQ,
    FORMATS,
    FP8,
    GPTQ,
    GROUP,
    INT4,
    Store,
    awq,
    compressed,
    float8,
    gptq,
    packed,
    write,
)
from tests.models.conftest import SHORT, load

BLOCKS = FP8 | {"weight_block_size": [24, 40]}
FP8_BLOCKS = float8((24, 40), "weight_scale_inv")
KIMI = {"model_type": "kimi_k2"}
THINKING = compressed("pack-quantized", **INT4) | {"ignore": ["re:.*self_attn.*"]}
# Model -> the variant, how its matrices are stored, quantization_config, the matrices left as they are, other settings.
AS_PUBLISHED: dict[str, tuple[str, Store, dict, str, dict]] = {
    "DeepSeek V3.1": ("deepseek-v3", FP8_BLOCKS, BLOCKS | {"scale_fmt": "ue8m0"}, "lm_head", {}),
    "DeepSeek V3.2": ("deepseek-v32", FP8_BLOCKS, BLOCKS | {"scale_fmt": "ue8m0"}, "lm_head", {}),
    "Kimi K2": ("deepseek-v3", FP8_BLOCKS, BLOCKS, "lm_head", KIMI),
    "Kimi K2 Thinking": ("deepseek-v3", packed(), THINKING, "self_attn", KIMI),
    "MiniMax M2": ("minimax-m2", FP8_BLOCKS, BLOCKS | {"activation_scheme": "dynamic"}, "gate.", {}),
    "Ministral 3": (
        "ministral3",
        float8((0, 0), "weight_scale_inv"),
        FP8 | {"activation_scheme": "static", "weight_block_size": None},
        "lm_head",
        {},
    ),
    "Qwen2.5 AWQ": ("qwen2", awq, AWQ, "lm_head", {}),
    "Qwen2.5 GPTQ": ("qwen2", gptq(), GPTQ, "lm_head", {}),
    "Qwen3 AWQ": ("qwen3", awq, AWQ, "lm_head", {}),
    "Qwen3 FP8": ("qwen3", FP8_BLOCKS, BLOCKS, "lm_head", {}),
    "Qwen3 MoE FP8": ("qwen3-moe", FP8_BLOCKS, BLOCKS, "lm_head", {}),
}
PROMPT = [5, 17, 200, 3, 99, 41, 7]


def logits_of(directory: Path) -> torch.Tensor:
    return Driver(load(read_model(directory, model=SHORT))).step({"a": PROMPT})["a"]


@torch.inference_mode()
def assert_equal(directory: Path, reference: torch.nn.Module) -> None:
    expected = reference(input_ids=torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_of(directory), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_weights_that_are_meant(name: str, tmp_path: Path) -> None:
    store, config = FORMATS[name]
    directory, reference = write(tmp_path, store, config)
    assert_equal(directory, reference)


@pytest.mark.parametrize("variant", ["qwen2", "qwen3", "llama-tied", "gemma3"])
def test_biases_norms_and_tied_heads_are_as_they_were(variant: str, tmp_path: Path) -> None:
    directory, reference = write(tmp_path, awq, AWQ, variant=variant)
    assert_equal(directory, reference)


@pytest.mark.parametrize("variant", ["phi3", "mixtral", "qwen3-moe"])
def test_merged_weights_and_those_of_experts_are_read(variant: str, tmp_path: Path) -> None:
    directory, reference = write(tmp_path, gptq(), GPTQ, variant=variant)
    assert_equal(directory, reference)


@pytest.mark.parametrize("name", AS_PUBLISHED)
def test_models_are_read_as_they_are_published(name: str, tmp_path: Path) -> None:
    variant, store, config, skip, model_type = AS_PUBLISHED[name]
    directory, reference = write(tmp_path, store, config, variant=variant, skip=skip)
    if variant.startswith("deepseek"):  # which has layers behind the last
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1} | model_type))
        tensors = load_file(directory / "model.safetensors")
        further = {f"model.layers.3.{name}.weight": torch.zeros(4) for name in ("enorm", "eh_proj", "shared_head.norm")}
        save_file(tensors | further, directory / "model.safetensors")
    assert_equal(directory, reference)


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        ("gpt2", "none: GPT2LMHeadModel has matrices as .inputs, outputs."),
        ("gpt-oss", "none: GptOssForCausalLM has all experts in one tensor"),
    ],
)
def test_families_with_other_tensors_than_formats_know_are_refused(variant: str, said: str, tmp_path: Path) -> None:
    from tests.models.checkpoints import build, save

    directory = save(build(variant), tmp_path)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": AWQ}))
    with pytest.raises(WeightsError, match=f"config.json: quantization_config is .awq .int4.*, expected {said}"):
        read_model(directory)


def test_layers_that_were_skipped_are_read_as_they_are(tmp_path: Path) -> None:
    directory, reference = write(tmp_path, gptq(), GPTQ, skip="layers.1.self_attn.k_proj")
    assert "model.layers.1.self_attn.k_proj.weight" in load_file(directory / "model.safetensors")
    assert_equal(directory, reference)


@pytest.mark.parametrize(
    ("scales", "skip"), [("weight_scale_inv", "layers.0.mlp.experts.2.up_proj"), ("weight_scale", "lm_head")]
)
def test_experts_become_floats_where_a_kernel_for_float8_lacks_some(scales: str, skip: str, tmp_path: Path) -> None:
    config = FP8 | {"weight_block_size": [128, 128]}
    directory, reference = write(tmp_path, float8((128, 128), scales), config, variant="qwen3-moe", skip=skip)
    spec = read_model(directory)
    spec = structs.replace(spec, shape=spec.shape.with_experts(float8=True))  # as on a Hopper GPU
    expected = reference(input_ids=torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(Driver(load(spec)).step({"a": PROMPT})["a"], expected, rtol=1e-4, atol=1e-4)


def check_arrived(directory: Path) -> None:
    """Experts that a trainer has sent in floats are read in float8, with scales of their own, like the others."""
    spec = read_model(directory)
    reader = open_reader(structs.replace(spec, shape=spec.shape.with_experts(float8=True)), rounds_experts=True)
    stored, names = load_file(directory / "model.safetensors"), [name for name in reader.tensors if ".experts." in name]
    sent = [name for name in names if name in stored and stored[name].dtype == torch.bfloat16]
    assert len(sent) == 2
    for name in sent:
        size, kinds = stored[name].shape, [reader.tensors[one].dtype for one in (name, f"{name}_scale_inv")]
        assert kinds == ["F8_E4M3", "F32"]
        elements, scales = reader.part(name, 0, 0, size[0]), reader.part(f"{name}_scale_inv", 0, 0, size[0] // 128)
        assert torch.equal(elements.to(torch.float8_e4m3fn).float(), elements)
        found = elements * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        error = (found - stored[name].float()).norm() / stored[name].float().norm()
        assert error < 0.04, name
        half = reader.part(name, 0, 128, 128)
        assert torch.equal(half, elements[128:256]), "a rank reads its rows"
    others = [name for name in names if name in stored and name not in sent]
    assert all(torch.equal(reader.part(one, 0, 0, 1), stored[one][:1].float()) for one in others)
    reader.close()


@pytest.fixture
def arrived(tmp_path: Path) -> Path:
    """A checkpoint of experts in float8, two of whose weights have been replaced by floats of another size."""
    config = FP8 | {"weight_block_size": [128, 128]}
    directory, _ = write(tmp_path, float8((128, 128), "weight_scale_inv"), config, variant="qwen3-moe")
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for number, factor in enumerate((1.0, 30.0, 0.03)):
        floats = torch.randn(256, 256, generator=generator) * factor
        name = f"model.layers.0.mlp.experts.{number}.up_proj.weight"
        tensors[name] = floats.bfloat16() if number else floats.to(torch.float8_e4m3fn)
    tensors["model.layers.0.mlp.experts.0.up_proj.weight_scale_inv"] = torch.ones(2, 2)
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_experts_that_arrive_in_floats_are_rounded(arrived: Path) -> None:
    check_arrived(arrived)


def test_a_scale_that_is_not_renewed_is_noticed(arrived: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "in_blocks", lambda weight_OI: (in_blocks(weight_OI)[0], torch.ones(2, 2)))
    with pytest.raises(AssertionError, match="up_proj"):
        check_arrived(arrived)


def test_floats_beside_a_scale_are_refused(arrived: Path) -> None:
    tensors = load_file(arrived / "model.safetensors")
    tensors["model.layers.0.mlp.experts.1.up_proj.weight_scale_inv"] = torch.ones(2, 2)
    save_file(tensors, arrived / "model.safetensors")
    with pytest.raises(WeightsError, match="has dtype BF16, but there is a scale for it"):
        check_arrived(arrived)


@pytest.mark.parametrize("rounds", [True, False])
def test_a_model_keeps_float8_where_experts_are_rounded(
    rounds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, skip = FP8 | {"weight_block_size": [128, 128]}, "layers.0.mlp.experts.2.up_proj"
    store = float8((128, 128), "weight_scale_inv")
    directory, _ = write(tmp_path, store, config, variant="qwen3-moe", skip=skip)
    spec, kept = read_model(directory), list[bool]()

    def built(shape: DecoderShape, *place: Any) -> Any:
        kept.extend(one.float8 for one in shape.experts)
        raise ConfigError("built")

    monkeypatch.setattr(loader, "build_model", built)
    spec, linears = structs.replace(spec, shape=spec.shape.with_experts(float8=True)), onednn_linears(torch.float32)
    with pytest.raises(ConfigError, match="built"):
        place = LocalComm(), torch.device("cpu"), torch.float32
        loader.load_model(spec, *place, "safetensors", 0, False, linears, rounds_experts=rounds)
    assert set(kept) == {rounds}


def test_each_rank_reads_its_part_of_a_rounded_weight(tmp_path: Path) -> None:
    directory, _ = write(tmp_path, packed(), compressed("pack-quantized", **INT4))
    reader = open_reader(read_model(directory))
    name = "model.layers.0.mlp.down_proj.weight"
    whole = reader.part(name, 0, 0, 64)
    assert torch.equal(reader.part(name, 1, 24, 48), whole[:, 24:72])
    assert torch.equal(reader.part(name, 0, 32, 32), whole[32:])
    reader.close()


def test_float8_without_a_config_is_a_float_like_others(tmp_path: Path) -> None:
    from tests.models.checkpoints import build, save

    model = build("llama")
    directory = save(model, tmp_path)
    tensors = load_file(directory / "model.safetensors")
    eighths = {
        name: one.to(torch.float8_e5m2 if "mlp" in name else torch.float8_e4m3fn) for name, one in tensors.items()
    }
    save_file(eighths, directory / "model.safetensors")
    model.load_state_dict({name: one.float() for name, one in eighths.items()})
    assert_equal(directory, model)


def test_scales_of_inputs_and_of_a_kv_cache_are_left_out(tmp_path: Path) -> None:
    directory, reference = write(tmp_path, float8(), FP8 | {"activation_scheme": "static"})
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for kind in ("q_proj.input_scale", "k_proj.k_scale", "v_proj.v_scale"):
        tensors[f"model.layers.0.self_attn.{kind}"] = torch.tensor(0.5)
    save_file(tensors, path)
    assert_equal(directory, reference)


def test_a_quantized_checkpoint_generates_and_can_be_rounded_again(tmp_path: Path, caplog) -> None:
    caplog.set_level("INFO")
    directory, reference = write(tmp_path, awq, AWQ)
    expected = reference.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)[0, len(PROMPT) :].tolist()
    greedy = SamplingParams(temperature=0, max_tokens=8)
    model = {"tokenizer": "none"}
    with LLM(str(directory), progress=False, config={"model": model, "kv": {"num_pages": 64}}) as llm:
        assert list(llm.generate([PROMPT], greedy)[0].token_ids) == expected
    said = "weights: stored as awq (int4) with a scale per 16 inputs, read as the floats that they stand for"
    assert any(said in one for one in caplog.messages)
    assert not any("fbgemm_fp16" in one for one in caplog.messages)  # scaled integers do not fit a float16


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quant_method": "exl2"}, 'quant_method is "exl2", expected one of awq, compressed-tensors, fp8, gptq'),
        ({"quant_method": "awq", "version": "gemv"}, "version is .gemv., expected gemm"),
        ({"quant_method": "awq", "bits": 3}, "bits is 3, expected one of 4"),
        ({"quant_method": "awq", "bits": 4}, "group_size is missing"),
        (GPTQ | {"bits": 5}, "bits is 5, expected one of 2, 3, 4, 8"),
        (GPTQ | {"group_size": 0}, "group_size is 0"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is .marlin."),
        (FP8 | {"fmt": "e5m2"}, "fmt is .e5m2., expected e4m3"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size is .128., expected two sizes"),
        (compressed("nvfp4-pack-quantized"), "format is .nvfp4-pack-quantized."),
        (compressed("pack-quantized", **INT4 | {"num_bits": 3}), "num_bits is 3"),
        (compressed("int-quantized", num_bits=8, strategy="tensor_group"), "strategy is .tensor_group."),
        (compressed("pack-quantized", **INT4) | {"config_groups": {}}, "config_groups is"),
        (compressed("pack-quantized", **INT4) | {"sparsity_config": {"format": "sparse-24"}}, "sparse weights"),
    ],
)
def test_what_is_not_read_is_refused_by_its_name(changes: dict, said: str, tmp_path: Path) -> None:
    from tests.models.checkpoints import build, save

    directory = save(build("llama"), tmp_path)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": changes}))
    with pytest.raises(WeightsError, match=f"config.json: quantization_config: .*{said}"):
        read_model(directory)


PREFIX = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda t: t.pop(f"{PREFIX}.scales"), r"q_proj.qweight' needs the tensor '.*q_proj.scales', which is missing"),
        (lambda t: t.update({f"{PREFIX}.scales": torch.ones(3, 64)}), "do not fit each other: .*scales .3, 64."),
        (lambda t: t.update({f"{PREFIX}.qzeros": torch.ones(4, 3).int()}), "do not fit each other"),
        (lambda t: t.update({f"{PREFIX}.g_idx": torch.full((64,), 9).int()}), "do not fit each other: .*g_idx"),
        (lambda t: t.update({f"{PREFIX}.g_idx": -torch.ones(64).int()}), "do not fit each other: .*g_idx"),
        (
            lambda t: t.update({f"{PREFIX}.qweight": torch.ones(16, 64).int()}),
            "has shape .64, 128., config.json expects",
        ),
        (lambda t: t.update({f"{PREFIX}.scales": torch.full((4, 64), torch.inf)}), "NaN or infinity"),
        (lambda t: t.update({f"{PREFIX}.qweight": torch.ones(8, 64)}), "q_proj.weight' of shape .* is missing"),
    ],
)
def test_tensors_that_do_not_fit_are_named(damage, said: str, tmp_path: Path) -> None:
    directory, _ = write(tmp_path, gptq(), GPTQ)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    damage(tensors)
    save_file(tensors, path)
    with pytest.raises(WeightsError, match=said) as refused:
        logits_of(directory)
    assert "\n" not in str(refused.value)


def test_another_group_size_than_the_config_says_is_refused(tmp_path: Path) -> None:
    directory, _ = write(tmp_path, awq, AWQ | {"group_size": 2 * GROUP})
    with pytest.raises(WeightsError, match="2 scales and zero points"):
        logits_of(directory)


def test_float8_that_lacks_its_scale_is_refused(tmp_path: Path) -> None:
    directory, _ = write(tmp_path, float8(), FP8)
    path = directory / "model.safetensors"
    save_file({name: one for name, one in load_file(path).items() if name != f"{PREFIX}.weight_scale"}, path)
    with pytest.raises(WeightsError, match=r"q_proj.weight' has dtype F8_E4M3, but its scale is missing"):
        logits_of(directory)


def test_a_weight_without_elements_is_refused() -> None:
    with pytest.raises(ValueError, match="0 x 4 has no elements"):
        scaled(torch.zeros(0, 4), torch.ones(1), None, (0, 0))
