"""GGUF files of checkpoints, as llama.cpp's converter writes them, for comparisons on the same weights.

    python benchmarks/llama_files.py CHECKPOINT --kinds Q4_0 Q4_1 Q4_K Q8_0   # CHECKPOINT/Q4_0.gguf and so on

Owns: the file.  Does not know: what serves it.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np


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
                wanted = "Q8_0" if kind.startswith("Q4") and "embed_tokens" in name else kind
                kind_of = gguf.GGMLQuantizationType[wanted if array.ndim == 2 else "F32"]
                if array.shape[-1] % gguf.GGML_QUANT_SIZES[kind_of][0]:
                    kind_of = gguf.GGMLQuantizationType.F16
                short = names.get_name(name, try_suffixes=(".weight",))
                blocks = q4_k(array) if kind_of.name == "Q4_K" else quantize(array, kind_of)
                writer.add_tensor(short, blocks, raw_dtype=kind_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def q4_k(rows: np.ndarray) -> np.ndarray:
    """Return rows as blocks of Q4_K, which the package gguf reads and does not write: (rows, inputs / 256 * 144) bytes.

    Each 32 elements get the least scale and minimum that cover them, where llama.cpp searches for better ones."""
    groups = rows.astype(np.float32).reshape(-1, 8, 32)
    lows = np.minimum(groups.min(-1), 0)
    scales = (groups.max(-1).clip(0) - lows) / 15
    step, low_step = (scales.max(-1) / 63).astype(np.float16), (-lows.min(-1) / 63).astype(np.float16)
    sixths, low_sixths = (
        np.rint(values / np.maximum(unit.astype(np.float32), 1e-12)[:, None]).clip(0, 63).astype(np.uint8)
        for values, unit in ((scales, step), (-lows, low_step))
    )
    scale = np.maximum(sixths * step.astype(np.float32)[:, None], 1e-12)[..., None]
    low = (low_sixths * low_step.astype(np.float32)[:, None])[..., None]
    nibbles = np.rint((groups + low) / scale).clip(0, 15).astype(np.uint8)
    packed = [
        sixths[:, :4] | sixths[:, 4:] >> 4 << 6,
        low_sixths[:, :4] | low_sixths[:, 4:] >> 4 << 6,
        sixths[:, 4:] & 15 | (low_sixths[:, 4:] & 15) << 4,
        (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).reshape(-1, 128),
    ]
    head = np.stack([step, low_step], -1).view(np.uint8)
    return np.concatenate([head, *packed], -1).reshape(len(rows), -1)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="of Qwen3, with a tied embedding and a tokenizer")
    parser.add_argument("--kinds", nargs="+", default=["Q8_0"], help="such as Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q8_0")
    parsed = parser.parse_args()
    for kind in parsed.kinds:
        write_gguf(parsed.checkpoint, path := parsed.checkpoint / f"{kind}.gguf", kind)
        print(path)


if __name__ == "__main__":
    main()
