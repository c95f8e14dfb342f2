"""GGUF files of checkpoints, as llama.cpp's converter writes them, for comparisons on the same weights.

Owns: the file.  Does not know: what serves it.
"""

import json
from pathlib import Path
from typing import Any


def can_write(directory: Path) -> bool:
    """Whether ``write_gguf`` knows the checkpoint's architecture."""
    config = json.loads((directory / "config.json").read_text())
    return config["architectures"] == ["Qwen3ForCausalLM"] and bool(config["tie_word_embeddings"])


def write_gguf(directory: Path, path: Path, kind: str) -> None:
    """A Qwen3 checkpoint with a tied embedding as llama.cpp's own converter writes it.

    kind: of matrices, such as Q8_0; those with rows that blocks do not fit are F16, and the embedding, which is the LM
    head too, has at least 8 bits, as ``llama-quantize`` has it."""
    import gguf
    from gguf.quants import quantize
    from safetensors import safe_open

    config = json.loads((directory / "config.json").read_text())
    layers = config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, layers)
    writer = gguf.GGUFWriter(path, "qwen3", use_temp_file=False)
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    _add_tokenizer(writer, directory, config["vocab_size"])
    for shard in sorted(directory.glob("*.safetensors")):
        with safe_open(shard, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - not a mapping
                array = stored.get_tensor(name).float().numpy()
                wanted = "Q8_0" if kind == "Q4_0" and "embed_tokens" in name else kind
                kind_of = gguf.GGMLQuantizationType[wanted if array.ndim == 2 else "F32"]
                if array.shape[-1] % gguf.GGML_QUANT_SIZES[kind_of][0]:
                    kind_of = gguf.GGMLQuantizationType.F16
                short = names.get_name(name, try_suffixes=(".weight",))
                writer.add_tensor(short, quantize(array, kind_of), raw_dtype=kind_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, directory: Path, vocab_size: int) -> None:
    stored = json.loads((directory / "tokenizer.json").read_text())
    special = {one["id"]: one["content"] for one in stored["added_tokens"]}
    tokens = {index: text for text, index in stored["model"]["vocab"].items()} | special
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens.get(index, f"[UNUSED{index}]") for index in range(vocab_size)])
    writer.add_token_types([3 if index in special else 1 if index in tokens else 5 for index in range(vocab_size)])
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in stored["model"]["merges"]])
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
