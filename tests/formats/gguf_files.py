"""A GGUF file of a model, with the names and numbers that llama.cpp's converter writes.

Owns: what the converter does to a family's numbers: norms with 1 added, reordered rows, stacks of experts, settings
that become tensors and tensors that become settings.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import PreTrainedModel

gguf = pytest.importorskip("gguf", reason="pip install 'callboard[gguf]'")
from gguf.quants import dequantize, quantize  # noqa: E402

Array = np.ndarray[Any, Any]
KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
EPS, OTHER_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
PAIRED = ("llama", "granite", "granitehybrid", "mistral3", "smollm3")
DELTA = ("qwen3next", "qwen35", "qwen35moe")
SHIFTED = ("gemma2", "gemma3", "nemotron", *DELTA)
TURNED = {"glm4": 0.5, "glm4moe": 0.5, "minimax-m2": 0.5, "nemotron": 0.5, "phi3": 1.0}  # part of a head that rotates
TURNED |= dict.fromkeys(DELTA, 0.25)
PATTERNED = ("exaone4", "olmo2")  # files of these say which layers have a window
ATTENDING = {"lfm2": ("full_attention",), "lfm2moe": ("full_attention",)}
ATTENDING |= dict.fromkeys(("granitehybrid", "nemotron_h", "nemotron_h_moe"), ("attention", "full_attention"))
LATENT = ("deepseek2", "deepseek32", "glm-dsa", "kimi-linear", "mistral4")
NAMED_AS = {"deepseek32": "glm-dsa"}  # the package does not know it yet
# Softmax, or sigmoids.
SCORES = {"deepseek_v2": 1, "deepseek_v3": 2, "deepseek_v32": 2, "glm_moe_dsa": 2, "kimi_linear": 2}
SCALES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
EXPERT = re.compile(r"\.experts\.(\d+)\.(\w+)$")
# What the converter calls the parts of Qwen's layer for multi-token prediction, and its package does not know.
PREDICTOR = {
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}
STACK = re.compile(r"\.experts\.(gate_up_proj|down_proj)(_bias)?$")


def write(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    keys: dict[str, str],
    *,
    experts: str = "F32",
    deltas: str = "F32",
    metadata: Mapping[str, Any] = {},
    behind: bool = False,
    saved: Path | None = None,
) -> None:
    """Write it.  keys: metadata below the architecture's name that other families lack, by names in config.json.

    experts, deltas: types of the stacks of experts, and of the matrices around the gated delta rule, whose numbers
    must not change by it.  With another type than F32, axes of 1 are left out as by llama-quantize.
    metadata: further values, or other ones; None leaves a key out.
    behind: whether a layer behind the last one, here with the same numbers, predicts a token more.
    saved: where the model was saved, with a layer for multi-token prediction."""
    config, kinds = model.config, {name: one for one, name in gguf.MODEL_ARCH_NAMES.items()}
    number = config.num_hidden_layers
    names = gguf.get_tensor_name_map(kinds[NAMED_AS.get(architecture, architecture)], number + 1)
    adapt = ADAPTED.get(architecture, lambda arrays, _: arrays)
    writer = gguf.GGUFWriter(path, architecture)
    facts = _facts(model, architecture, keys)
    if behind:
        writer.add_tensor(f"blk.{number}.nextn.eh_proj.weight", np.zeros((config.hidden_size, 2), np.float32))
    if behind or saved is not None:
        facts |= {"block_count": number + 1, "nextn_predict_layers": 1}
        if recurrent := facts.get("attention.recurrent_layers"):
            recurrent.append(False)
    values = {f"{architecture}.{key}": value for key, value in facts.items()}
    for key, value in (values | {"tokenizer.ggml.eos_token_id": 2} | dict(metadata)).items():
        if value is not None:
            _add(writer, key, value)
    if saved is None:
        saved = path.parent / "saved"
        model.save_pretrained(saved)
    arrays = {
        name.replace("mtp.layers.0.", f"model.layers.{number}."): tensor.float().numpy()
        for name, tensor in load_file(saved / "model.safetensors").items()
    }
    if behind:
        last = {name: array for name, array in arrays.items() if f".layers.{number - 1}." in name}
        arrays |= {name.replace(f".{number - 1}.", f".{number}.", 1): array for name, array in last.items()}
    if architecture in LATENT:
        arrays = _split(arrays, config)
    if architecture == "apertus":
        arrays = _numbers_as_settings(writer, arrays)
    for name, array in _stacked(
        _separated(
            _recurrent(adapt(arrays, config), getattr(config, "mamba_n_groups", None) or getattr(config, "n_groups", 1))
        )
    ).items():
        stem = name.rpartition(".")[0]
        if architecture in PAIRED and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            array = reordered(array, heads)
        is_norm = name.endswith("norm.weight") or ".pre_fc_norm_" in name
        if architecture in SHIFTED and is_norm and ".linear_attn." not in name:
            array = array + 1
        short = _scale(name) or names.get_name(_merged(name, architecture), (".weight", ".bias"))
        if name in PREDICTOR:
            short = f"blk.{number}.{PREDICTOR[name]}"
        assert short is not None, f"the package has no name for {name}"
        form = experts if short.endswith("_exps.weight") else "F32"
        if ".linear_attn." in name and array.ndim > 1 and "conv1d" not in name:
            form = deltas
        while (experts, deltas) != ("F32", "F32") and array.ndim > 1 and len(array) == 1:
            array = array[0]
        kind = gguf.GGMLQuantizationType[form]
        data = array if kind.name == "F32" else quantize(array, kind)
        writer.add_tensor(short, data, raw_dtype=kind)
    rotary = getattr(config, "rope_parameters", None) or {}
    if rotary.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _divisors(config))
    if architecture == "gemma4":
        writer.add_tensor("rope_freqs.weight", _turned_or_not(config))
    for side in ("short", "long"):
        if factors := rotary.get(f"{side}_factor"):
            writer.add_tensor(f"rope_factors_{side}.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rounded(array: Array, kind: str) -> Array:
    """The numbers that the rows of an array become in blocks."""
    stored = gguf.GGMLQuantizationType[kind]
    return dequantize(quantize(array, stored), stored).astype(np.float32).reshape(array.shape)


def reordered(array: Array, heads: int) -> Array:
    """Rows of queries or keys as the converter writes them for llama."""
    return np.ascontiguousarray(array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape))


def _upright(arrays: dict[str, Array], config: Any) -> dict[str, Array]:
    """Return GPT-2's matrices as [outputs, inputs]."""
    return {
        name: np.ascontiguousarray(array.T) if re.search(r"\.c_\w+\.weight$", name) else array
        for name, array in arrays.items()
    }


def _multiplied(arrays: dict[str, Array], config: Any) -> dict[str, Array]:
    """Return Falcon-H1's weights with its constant factors in them."""
    into, state = config.attention_in_multiplier, config.mamba_n_groups * config.mamba_d_state
    sizes = (config.mamba_d_ssm, config.mamba_d_ssm, state, state, config.mamba_n_heads)
    factors = {
        "embed_tokens": config.embedding_multiplier,
        "lm_head": config.lm_head_multiplier,
        "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1],
        "q_proj": into,
        "k_proj": into * config.key_multiplier,
        "v_proj": into,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "in_proj": config.ssm_in_multiplier * np.repeat(config.ssm_multipliers, sizes)[:, None],
    }
    return {name: (array * factors.get(name.split(".")[-2], 1)).astype(np.float32) for name, array in arrays.items()}


def _in_two(arrays: dict[str, Array], config: Any) -> dict[str, Array]:
    """Return Qwen3-Next's queries, keys, values and gates, which lie by heads with a key, as two matrices."""
    keys, per = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    sizes = np.cumsum([config.linear_key_head_dim] * 2 + [per * config.linear_value_head_dim])
    parts: dict[str, Array] = {}
    for name, array in arrays.items():
        if name.endswith(".in_proj_qkvz.weight"):
            kinds = np.split(array.reshape(keys, -1, array.shape[1]), sizes, axis=1)
            flat = [one.reshape(-1, array.shape[1]) for one in kinds]
            parts[name.replace("qkvz", "qkv")] = np.concatenate(flat[:3])
            parts[name.replace("qkvz", "z")] = flat[3]
        else:
            parts[name] = array
    return parts


def _by_turns(arrays: dict[str, Array], config: Any) -> dict[str, Array]:
    """Return Qwen3.5's heads with a value as the first one of each key, then the second one of each, and so on."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    order = np.arange(heads).reshape(keys, -1).T.flatten()
    channels = 2 * keys * config.linear_key_head_dim
    parts: dict[str, Array] = {}
    for name, array in arrays.items():
        part = name.partition(".linear_attn.")[2]
        if part == "out_proj.weight":
            array = array.reshape(len(array), heads, -1)[:, order].reshape(array.shape)
        elif part and part != "norm.weight":
            first = channels if part.startswith(("in_proj_qkv", "conv1d")) else 0
            values = array[first:].reshape(heads, -1, *array.shape[1:])[order].reshape(array[first:].shape)
            array = np.concatenate((array[:first], values))
        parts[name] = array
    return parts


def _halved(arrays: dict[str, Array], config: Any) -> dict[str, Array]:
    """Return Mistral 4's stacks as its own format has them, gate and up apart; others as they are."""
    parts: dict[str, Array] = {}
    for name, array in _ended(arrays, config).items():
        if name.endswith("experts.gate_up_proj.weight"):
            for side, half in zip(("gate", "up"), np.split(array, 2, axis=1), strict=True):
                parts[name.replace("gate_up", side)] = np.ascontiguousarray(half)
        else:
            parts[name] = array
    return parts


def _ended(arrays: dict[str, Array], config: Any) -> dict[str, Array]:
    """Return Gemma 4's numbers of layers and stacks, which stay as they are, with names that end as weights do."""
    own = re.compile(r"\.(layer_scalar|experts\.\w+)$")
    return {f"{name}.weight" if own.search(name) else name: array for name, array in arrays.items()}


ADAPTED = {"gpt2": _upright, "falcon-h1": _multiplied, "gemma4": _ended, "mistral4": _ended, "deepseek2": _halved}
ADAPTED |= {"qwen3next": _in_two, **dict.fromkeys(("qwen35", "qwen35moe"), _by_turns)}


def _scale(name: str) -> str | None:
    """Return the name of a scale, for which the package has none."""
    found = re.search(r"\.layers\.(\d+)\.(router\.\w+)$", name)
    return f"blk.{found[1]}.{SCALES[found[2]]}" if found else None


def _turned_or_not(config: Any) -> Array:
    """The divisors of rotary frequencies of Gemma 4's layers without a window."""
    rotary, half = config.rope_parameters["full_attention"], _heads(config, "full_attention")[0] // 2
    turned = int(rotary["partial_rotary_factor"] * half)
    return np.array([1.0] * turned + [1e30] * (half - turned), np.float32)


def _heads(config: Any, kind: str) -> tuple[int, int]:
    """Return the size and the number of the key/value heads of layers of a kind."""
    fields = config.to_dict()
    fields |= (fields.get("per_layer_config") or {}).get(str(config.layer_types.index(kind)), {})
    return fields["head_dim"], fields["num_key_value_heads"]


def _recurrent(arrays: dict[str, Array], groups: int) -> dict[str, Array]:
    """Return the numbers of recurrent layers as they are written: rates, not their logarithms, and other axes."""
    parts: dict[str, Array] = {}
    for name, array in arrays.items():
        if name.endswith("A_log"):
            array = -np.exp(array)
        if name.endswith((".A_log", ".D")) and "_attn." not in name:
            array = array[:, None]
        if name.endswith("_conv1d.weight"):
            array = array.reshape(1, len(array), 1, -1)
        if name.endswith((".conv1d.weight", ".conv.conv.weight")):
            array = np.ascontiguousarray(array.squeeze(1))
        if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
            array = array.reshape(groups, -1)
        parts[name.replace(".dt_bias", ".dt_proj.bias").replace(".expert_bias", ".expert_bias.bias")] = array
    return parts


def _divisors(config: Any) -> Array:
    """The divisors of rotary frequencies that llama3 comes to."""
    rotary, size = config.rope_parameters, config.hidden_size // config.num_attention_heads
    plain = rotary["rope_theta"] ** -(np.arange(0, size, 2) / size)
    turns = rotary["original_max_position_embeddings"] * plain / (2 * np.pi)
    low, high = rotary["low_freq_factor"], rotary["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / (kept + (1 - kept) / rotary["factor"])).astype(np.float32)


def _add(writer: Any, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    add.get(type(value), writer.add_float32)(key, value)


def _facts(model: PreTrainedModel, architecture: str, keys: dict[str, str]) -> dict[str, Any]:
    config = model.config
    if architecture == "gpt2":
        return {key: getattr(config, name) for key, name in keys.items()} | {"feed_forward_length": 4 * config.n_embd}
    fields = config.to_dict()  # of what differs by layer, it alone has the common value
    facts: dict[str, Any] = {
        key: fields[name] if name in fields else getattr(config, name) for key, name in {**KEYS, **keys}.items()
    }
    if OTHER_EPS not in keys:
        field = {"lfm": "norm_eps", "nem": "layer_norm_epsilon"}.get(architecture[:3], "rms_norm_eps")
        facts[EPS] = getattr(config, field)
    if architecture in ATTENDING:
        kinds = getattr(config, "layers_block_type", None) or config.layer_types
        heads = [config.num_key_value_heads if kind in ATTENDING[architecture] else 0 for kind in kinds]
        facts["attention.head_count_kv"] = heads
        if architecture.startswith("nemotron_h"):
            sizes = {"mlp": config.intermediate_size, "moe": config.moe_intermediate_size}
            facts["feed_forward_length"] = [sizes.get(kind, 0) for kind in kinds]
            facts["ssm.inner_size"] = config.mamba_num_heads * config.mamba_head_dim
    if architecture in DELTA:
        facts["ssm.inner_size"] = config.linear_num_value_heads * config.linear_value_head_dim
        recurrent = [one == "linear_attention" for one in config.layer_types]
        if recurrent == [bool((layer + 1) % 4) for layer in range(len(recurrent))]:
            facts["full_attention_interval"] = 4  # early files have no list
        else:
            facts["attention.recurrent_layers"] = recurrent
    if architecture == "qwen35moe":
        del facts["feed_forward_length"]  # published models have no MLPs
    if architecture == "lfm2" and config.block_auto_adjust_ff_dim:
        multiple = config.block_multiple_of
        size = int(config.block_ffn_dim_multiplier * int(2 * config.intermediate_size / 3))
        facts["feed_forward_length"] = -(-size // multiple) * multiple
    rotary = getattr(config, "rope_parameters", None) or {"rope_theta": 1e4, "rope_type": "default"}
    rotary = rotary.get("full_attention", rotary)
    theta, size = rotary["rope_theta"], fields.get("head_dim")
    if size:
        facts["attention.key_length"] = size
    size = size or config.hidden_size // config.num_attention_heads
    if rotary.get("alpha"):
        theta *= rotary["alpha"] ** (size / (size - 2))
    facts["rope.freq_base"] = theta
    if architecture == "gemma4":
        facts |= _layered(config)
    if architecture in TURNED:
        facts["rope.dimension_count"] = int(size * rotary.get("partial_rotary_factor", TURNED[architecture]))
    if architecture in PATTERNED and getattr(config, "sliding_window", None):
        pattern = [one == "sliding_attention" for one in config.layer_types]
        facts["attention.sliding_window_pattern"] = pattern
    if rotary["rope_type"] == "yarn":
        facts |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rotary["factor"]}
        facts["rope.scaling.original_context_length"] = rotary["original_max_position_embeddings"]
    if "llama_4_scaling_beta" in rotary and architecture != "mistral4":
        facts["rope.scaling.yarn_log_multiplier"] = rotary["mscale_all_dim"]
        facts["attention.temperature_scale"] = rotary["llama_4_scaling_beta"]
    if architecture in LATENT:
        facts |= _latents(config)
    if rotary["rope_type"] == "longrope":
        stretch = config.max_position_embeddings / config.original_max_position_embeddings
        factor = (1 + np.log(stretch) / np.log(config.original_max_position_embeddings)) ** 0.5
        facts["rope.scaling.attn_factor"] = float(factor)
    return facts


def _latents(config: Any) -> dict[str, Any]:
    """The sizes of attention over latents, which the converter gives as one head of keys."""
    hybrid, scaling = config.model_type == "kimi_linear", getattr(config, "rope_parameters", None) or {}
    facts = {"attention.q_lora_rank": config.q_lora_rank} if config.q_lora_rank else {}
    if logarithmic := scaling.get("mscale_all_dim"):
        facts["rope.scaling.yarn_log_multiplier"] = 0.1 * logarithmic
    if config.model_type in SCORES:
        facts["expert_gating_func"] = SCORES[config.model_type]
    return facts | {
        "attention.head_count_kv": [int(one == "full_attention") for one in config.layer_types] if hybrid else 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "rope.dimension_count": config.qk_rope_head_dim,
        "vocab_size": 154_880 if config.model_type == "glm4_moe_lite" else config.vocab_size,
    }


def _layered(config: Any) -> dict[str, Any]:
    """The numbers that differ by layer, or by kind of layer, as the converter gives them for Gemma 4."""
    (whole, shared), (windowed, own) = (_heads(config, f"{kind}_attention") for kind in ("full", "sliding"))
    pattern = [kind == "sliding_attention" for kind in config.layer_types]
    facts: dict[str, Any] = {
        "attention.sliding_window_pattern": pattern,
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
    }
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        facts |= {key: whole, f"{key}_swa": windowed}
    if shared != own:
        facts["attention.head_count_kv"] = [own if one else shared for one in pattern]
    if config.use_double_wide_mlp:
        first, size = len(pattern) - config.num_kv_shared_layers, config.intermediate_size
        facts["feed_forward_length"] = [size * (1 + (layer >= first)) for layer in range(len(pattern))]
    return facts


def _split(arrays: dict[str, Array], config: Any) -> dict[str, Array]:
    """Return the maps of latents as a stack of heads to keys, turned, and one to values."""
    parts: dict[str, Array] = {}
    for name, array in arrays.items():
        if "kv_b_proj" not in name:
            parts[name] = array
            continue
        heads = array.reshape(config.num_attention_heads, -1, array.shape[1])
        key, value = heads[:, : config.qk_nope_head_dim], heads[:, config.qk_nope_head_dim :]
        parts[name.replace("kv_b_proj", "k_b_proj")] = np.ascontiguousarray(key.swapaxes(1, 2))
        parts[name.replace("kv_b_proj", "v_b_proj")] = np.ascontiguousarray(value)
    return parts


def _numbers_as_settings(writer: Any, arrays: dict[str, Array]) -> dict[str, Array]:
    """Add the numbers of Apertus' activations as settings, and return the other tensors."""
    for kind in ("alpha_p", "alpha_n", "beta", "eps"):
        own = [float(array.reshape(())) for name, array in sorted(arrays.items()) if name.endswith(f"act_fn.{kind}")]
        writer.add_array(f"xielu.{kind}", own)
    return {name: array for name, array in arrays.items() if ".act_fn." not in name}


def _separated(arrays: dict[str, Array]) -> dict[str, Array]:
    """Return stacks of [experts, in, out] as [experts, out, in], gate and up apart, with names that end alike."""
    parts: dict[str, Array] = {}
    for name, array in arrays.items():
        found = STACK.search(name)
        if name.endswith("e_score_correction_bias"):
            parts[name.replace("_bias", ".bias")] = array
        elif name.endswith("shared_mlp.input_linear.weight"):
            base = name.replace("shared_mlp.input_linear.weight", _beside(arrays, "mlp."))
            parts |= dict(zip((f"{base}gate_proj.weight", f"{base}up_proj.weight"), np.split(array, 2), strict=True))
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            base = name.replace("block_sparse_moe.input_linear.weight", "mlp.experts.")
            for side, own in zip(("gate", "up"), np.split(array, 2, axis=1), strict=True):
                parts[f"{base}{side}_proj.weight"] = np.ascontiguousarray(own)
        elif name.endswith("sinks"):
            parts[f"{name}.weight"] = array
        elif found is None:
            name = name.replace("shared_mlp.output_linear", f"{_beside(arrays, 'mlp.')}down_proj")
            parts[name.replace("block_sparse_moe.output_linear", "mlp.experts.down_proj")] = array
        else:
            base, end = name[: found.start()], ".bias" if found[2] else ".weight"
            rows = array if found[2] else array.swapaxes(1, 2)
            if found[1] == "down_proj":
                parts[f"{base}.experts.down_proj{end}"] = np.ascontiguousarray(rows)
                continue
            alternate = "gpt_oss" if f"{name.removesuffix('_bias')}_bias" in arrays else ""
            sides = (rows[:, ::2], rows[:, 1::2]) if alternate else np.split(rows, 2, axis=1)
            for side, own in zip(("gate", "up"), sides, strict=True):
                parts[f"{base}.experts.{side}_proj{end}"] = np.ascontiguousarray(own)
    return parts


def _merged(name: str, architecture: str) -> str:
    """Return the name of a stack of experts that the converter makes; other names as they are."""
    if ".experts." in name and architecture == "lfm2moe":
        return name.removeprefix("model.")
    if ".experts." in name and architecture == "nemotron_h_moe":
        return name.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
    return name


def _beside(arrays: dict[str, Array], name: str) -> str:
    """Return the name of Granite's MLP: that of a shared expert if there are experts."""
    return "mlp.shared_experts." if any("block_sparse_moe" in one for one in arrays) else name


def _stacked(arrays: dict[str, Array]) -> dict[str, Array]:
    """Return the matrices of each expert as one stack."""
    stacks: dict[str, dict[int, Array]] = {}
    whole: dict[str, Array] = {}
    for name, array in arrays.items():
        stem, _, end = name.rpartition(".")
        if found := EXPERT.search(stem):
            stacks.setdefault(f"{stem[: found.start()]}.experts.{found[2]}.{end}", {})[int(found[1])] = array
        else:
            whole[name] = array
    return whole | {name: np.stack([own[one] for one in sorted(own)]) for name, own in stacks.items()}
