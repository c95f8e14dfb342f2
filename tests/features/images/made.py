"""Tiny checkpoints of models that see, made with transformers: its processor, a tokenizer of bytes, random weights.

Owns: their files, pictures of odd sizes, the reference's answers.  Does not know: the engine.
"""

import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEXT: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
GEMMA4_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 256,
}
SPECIAL = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]


class Kind(NamedTuple):
    """A kind of model.

    config: of the whole model.  processor: of pictures, by the name of its class.  tokens: of pictures.
    mark: text that the template writes for a picture.  call: arguments that its processor gives that of pictures."""

    name: str
    config: dict[str, Any]
    processor: tuple[str, dict[str, Any]]
    tokens: tuple[str, ...]
    mark: str
    call: dict[str, Any] = {}  # noqa: RUF012

    def film_mark(self) -> str:
        """Return what the template writes for a film."""
        if self.tokens == QWEN_TOKENS:
            return "<|vision_start|><|video_pad|><|vision_end|>"
        return "<|video|>" if self.name == "Gemma4" else "<video>"


SQUARE = {"height": 56, "width": 56}
GRIDS = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
BLOCKS = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 14,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
QWEN_PIXELS = {"size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 24}, "patch_size": 14, "merge_size": 2}
QWEN_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_TILES = (
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{i}_col_{j}>" for i in range(1, 5) for j in range(1, 5)),
)
_TYPES = {"Qwen": "mm_token_type_ids", "Gemma3": "token_type_ids", "Gemma4": "mm_token_type_ids"}
QWEN_IDS = {"video_token_id": 7, "vision_start_token_id": 8, "vision_end_token_id": 9}
KINDS = {
    "idefics3": Kind(
        "Idefics3",
        {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": TOWER,
            "scale_factor": 2,
            "pad_token_id": 0,
        },
        ("Idefics3ImageProcessorPil", {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}),
        ("<image>", *_TILES),
        "<image>",
    ),
    "smolvlm": Kind(
        "SmolVLM",
        {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": TOWER,
            "scale_factor": 2,
            "pad_token_id": 0,
        },
        ("SmolVLMImageProcessorPil", {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}),
        ("<image>", *_TILES),
        "<image>",
    ),
    "qwen2_vl": Kind(
        "Qwen2VL",
        {
            "text_config": TEXT | {"rope_parameters": MROPE},
            "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        }
        | QWEN_IDS,
        ("Qwen2VLImageProcessorPil", QWEN_PIXELS),
        QWEN_TOKENS,
        QWEN_MARK,
    ),
    "qwen2_5_vl": Kind(
        "Qwen2_5_VL",
        {
            "text_config": TEXT | {"rope_parameters": MROPE},
            "vision_config": BLOCKS | {"window_size": 56, "fullatt_block_indexes": [1]},
        }
        | QWEN_IDS,
        ("Qwen2VLImageProcessorPil", QWEN_PIXELS),
        QWEN_TOKENS,
        QWEN_MARK,
    ),
    "qwen3_vl": Kind(
        "Qwen3VL",
        {
            "text_config": TEXT | {"rope_parameters": MROPE | {"mrope_interleaved": True}},
            "vision_config": BLOCKS | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
        }
        | QWEN_IDS,
        ("Qwen2VLImageProcessorPil", QWEN_PIXELS),
        QWEN_TOKENS,
        QWEN_MARK,
    ),
    "llava": Kind(
        "Llava",
        {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": TOWER | {"model_type": "clip_vision_model", "projection_dim": 32},
            "image_seq_length": 16,
        },
        ("CLIPImageProcessorPil", {"size": {"shortest_edge": 56}, "crop_size": SQUARE}),
        ("<image>",),
        "<image>\n",
    ),
    "llava_next": Kind(
        "LlavaNext",
        {
            "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
            "vision_config": TOWER | {"model_type": "clip_vision_model", "projection_dim": 32},
            "image_grid_pinpoints": GRIDS,
        },
        (
            "LlavaNextImageProcessorPil",
            {"size": {"shortest_edge": 56}, "crop_size": SQUARE, "image_grid_pinpoints": GRIDS},
        ),
        ("<image>",),
        "<image>\n",
    ),
    "llava_onevision": Kind(
        "LlavaOnevision",
        {
            "text_config": TEXT | {"model_type": "qwen2"},
            "vision_config": TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
            "image_grid_pinpoints": GRIDS,
            "vision_aspect_ratio": "anyres_max_2",
            "video_token_id": 7,
        },
        ("LlavaOnevisionImageProcessorPil", {"size": SQUARE, "image_grid_pinpoints": GRIDS}),
        ("<image>", "<|unused|>"),
        "<image>\n",
    ),
    "qwen3_vl_moe": Kind(
        "Qwen3VLMoe",
        {
            "text_config": TEXT
            | {"rope_parameters": MROPE | {"mrope_interleaved": True}}
            | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "decoder_sparse_step": 1},
            "vision_config": BLOCKS | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
        }
        | QWEN_IDS,
        ("Qwen2VLImageProcessorPil", QWEN_PIXELS),
        QWEN_TOKENS,
        QWEN_MARK,
    ),
    "qwen3_5": Kind(
        "Qwen3_5",
        {
            "text_config": TEXT
            | {
                "num_hidden_layers": 4,
                "head_dim": 32,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 12,
                "full_attention_interval": 4,
                "rope_parameters": MROPE
                | {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25},
            },
            "vision_config": BLOCKS | {"num_position_embeddings": 64},
        }
        | QWEN_IDS,
        ("Qwen2VLImageProcessorPil", QWEN_PIXELS),
        QWEN_TOKENS,
        QWEN_MARK,
    ),
    "mistral3": Kind(
        "Mistral3",
        {
            "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
            "vision_config": TOWER | {"model_type": "pixtral", "head_dim": 16},
            "spatial_merge_size": 2,
        },
        ("PixtralImageProcessorPil", {"size": {"longest_edge": 112}, "patch_size": {"height": 14, "width": 14}}),
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        "[IMG]",
        {"patch_size": {"height": 28, "width": 28}},
    ),
    "pixtral": Kind(
        "Llava",
        {
            "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
            "vision_config": TOWER | {"model_type": "pixtral", "head_dim": 16},
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": -1,
        },
        ("PixtralImageProcessorPil", {"size": {"longest_edge": 112}, "patch_size": {"height": 14, "width": 14}}),
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        "[IMG]",
    ),
    "gemma3": Kind(
        "Gemma3",
        {
            "text_config": TEXT
            | {"num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 11, "query_pre_attn_scalar": 16}
            | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            "vision_config": TOWER,
            "mm_tokens_per_image": 16,
            "boi_token_index": 7,
            "eoi_token_index": 8,
        },
        ("Gemma3ImageProcessorPil", {"size": SQUARE}),
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        "<start_of_image>",
    ),
    "gemma4": Kind(
        "Gemma4",
        {
            "text_config": TEXT
            | {
                "num_hidden_layers": 5,
                "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention", "full_attention"],
                "sliding_window": 23,
                "num_kv_shared_layers": 1,
                "global_head_dim": 32,
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
                "vocab_size_per_layer_input": 384,
                "hidden_size_per_layer_input": 8,
                "use_bidirectional_attention": "vision",
            },
            "vision_config": GEMMA4_TOWER,
            "video_token_id": 383,  # which transformers reads as a place of a film where a model writes it
        },
        ("Gemma4ImageProcessorPil", {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}),
        ("<|image|>", "<|image>", "<image|>"),
        "<|image|>",
    ),
    "internvl": Kind(
        "InternVL",
        {
            "text_config": TEXT | {"model_type": "qwen3"},
            "vision_config": TOWER | {"image_size": [56, 56], "patch_size": [14, 14]},
            "image_seq_length": 4,
            "downsample_ratio": 0.5,
        },
        ("GotOcr2ImageProcessorPil", {"size": SQUARE, "max_patches": 4}),
        ("<IMG_CONTEXT>", "<img>", "</img>"),
        "<IMG_CONTEXT>\n",
        {"crop_to_patches": True},
    ),
}


_SMALL = {"use_bidirectional_attention": None}
KINDS["gemma4_small"] = KINDS["gemma4"]._replace(
    config=KINDS["gemma4"].config | {"text_config": KINDS["gemma4"].config["text_config"] | _SMALL}
)


def special_tokens(kind: Kind) -> list[str]:
    """The special tokens of a kind's tokenizer, by id."""
    return [*SPECIAL, *kind.tokens]


def write_tokenizer(kind: Kind, directory: Path) -> None:
    """Write a tokenizer of bytes, and a chat template that reads parts alone."""
    special = special_tokens(kind)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = (
        "<s>{% for message in messages %}<|{{ message['role'] }}|>{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}"
        + kind.mark.replace("\n", "{{ '\\n' }}")
        + "{% elif part['type'] == 'video' %}"
        + kind.film_mark()
        + "{% else %}{{ part['text'] }}"
        "{% endif %}{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    fast.save_pretrained(directory)


def make(kind_name: str, directory: Path) -> Path:
    """Write the checkpoint of a kind."""
    kind = KINDS[kind_name]
    write_tokenizer(kind, directory)
    processor_name, settings = kind.processor
    getattr(transformers, processor_name)(**settings).save_pretrained(directory)
    config = getattr(transformers, f"{kind.name}Config")(
        **kind.config, image_token_id=special_tokens(kind).index(kind.tokens[0]), tie_word_embeddings=False
    )
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind.name}ForConditionalGeneration")(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:  # large embeddings would hide what attention adds to them
                weight.normal_(0, 0.02 if "embed_tokens" in name else 0.3 if kind.name.startswith("Gemma") else 0.15)
        # transformers takes such a token for the place of a picture even where the model has generated it
        model.get_output_embeddings().weight[model.config.image_token_id] = 0.0
    model.save_pretrained(directory)
    if kind.name == "Qwen3VLMoe":  # transformers 5 reads the published order of a stack, and writes another
        path = directory / "model.safetensors"
        stored = load_file(path)
        turned = {name: one.mT.contiguous() for name, one in stored.items() if ".experts." in name}
        save_file(stored | turned, path, metadata={"format": "pt"})
    return directory


@cache
def picture(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG of random squares."""
    colours = np.random.default_rng((width, height, seed)).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).resize((width, height), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


@torch.no_grad()
def reference(
    name: str, directory: Path, token_ids: Sequence[int], files: Sequence[bytes], num_tokens: int
) -> list[int]:
    """The greedy tokens of transformers.  token_ids: with the model's own token at places of pictures."""
    kind = KINDS[name]
    model = getattr(transformers, f"{kind.name}ForConditionalGeneration").from_pretrained(directory).eval()
    processor = getattr(transformers, kind.processor[0]).from_pretrained(directory)
    images = [Image.open(io.BytesIO(one)).convert("RGB") for one in files]
    ids = torch.tensor([list(token_ids)])
    inputs = processor(images=images, return_tensors="pt", **kind.call) if images else {}
    inputs.pop("num_patches", None)
    inputs.pop("num_crops", None)
    inputs.pop("num_soft_tokens_per_image", None)
    own = special_tokens(kind).index(kind.tokens[0])
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **inputs,
        **{types: (ids == own).to(torch.int64) for name, types in _TYPES.items() if kind.name.startswith(name)},
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=-1,
    )
    return output[0, len(token_ids) :].tolist()
