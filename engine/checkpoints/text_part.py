"""The text decoder of a model that also reads images or sound, which is the part of its checkpoint that is served.

Owns: which decoder it is, its settings in config.json, its tensors among the others.  Does not know: torch, families.
"""

import logging
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from engine.checkpoints.fields import Fields
from engine.checkpoints.shards import StoredTensor

log = logging.getLogger(__name__)

LLAMA = ("LlamaForCausalLM", "llama")
MISTRAL = {"mistral": ("MistralForCausalLM", "mistral"), "ministral3": ("Ministral3ForCausalLM", "ministral3")}
MISTRAL4 = ("Mistral4ForCausalLM", "mistral4")
QWEN2, QWEN3 = ("Qwen2ForCausalLM", "qwen2"), ("Qwen3ForCausalLM", "qwen3")
QWEN3_MOE = ("Qwen3MoeForCausalLM", "qwen3_moe")
# Architecture -> model_type of its text section -> the decoder's architecture and model_type.
TEXT_PARTS: Final[Mapping[str, Mapping[str, tuple[str, str]]]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": ("Gemma3ForCausalLM", "gemma3_text")},
    "Gemma3nForConditionalGeneration": {"gemma3n_text": ("Gemma3nForCausalLM", "gemma3n_text")},
    "Gemma4ForConditionalGeneration": {"gemma4_text": ("Gemma4ForCausalLM", "gemma4_text")},
    "Llama4ForConditionalGeneration": {"llama4_text": ("Llama4ForCausalLM", "llama4_text")},
    "Idefics3ForConditionalGeneration": {"llama": LLAMA},
    "InternVLForConditionalGeneration": {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE},
    "LlavaForConditionalGeneration": {"llama": LLAMA, **MISTRAL, "qwen2": QWEN2},
    "LlavaNextForConditionalGeneration": {"llama": LLAMA, **MISTRAL, "qwen2": QWEN2},
    "LlavaOnevisionForConditionalGeneration": {"qwen2": QWEN2},
    "Mistral3ForConditionalGeneration": {**MISTRAL, "mistral4": MISTRAL4},
    "Qwen2VLForConditionalGeneration": {"qwen2_vl": QWEN2, "qwen2_vl_text": QWEN2},
    "Qwen2_5_VLForConditionalGeneration": {"qwen2_5_vl": QWEN2, "qwen2_5_vl_text": QWEN2},
    "Qwen3OmniMoeForConditionalGeneration": {"qwen3_omni_moe_text": QWEN3_MOE},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": QWEN3},
    "Qwen3VLMoeForConditionalGeneration": {"qwen3_vl_moe_text": ("Qwen3MoeForCausalLM", "qwen3_vl_moe_text")},
    "SmolVLMForConditionalGeneration": {"llama": LLAMA},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": ("Qwen3_5ForCausalLM", "qwen3_5_text")},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text")},
}
# Settings that may be beside the text section and count for it.
SHARED = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config", "eos_token_id", "bos_token_id")
RENAMED = (
    (re.compile(r"^(?:thinker\.model|language_model\.model|model\.language_model|model\.text_model)\."), "model."),
    (re.compile(r"^(?:thinker|language_model)\.lm_head\."), "lm_head."),
)
LEFT_OUT = re.compile(
    r"^(?:model\.|thinker\.)?"
    r"(visual|vision_\w+|audio_tower|multi_modal_projector|connector|embed_(?:vision|audio)|talker|code2wav|"
    r"image_newline)(?:\.|$)"
)


def read_text_part(architecture: str, fields: Fields) -> tuple[str, Fields]:
    """Return the architecture and the settings of the text decoder; what is given for a model of text alone.

    Raises WeightsError for a decoder that this kind of model does not have."""
    decoders = TEXT_PARTS.get(architecture)
    if decoders is None:
        return architecture, fields
    # Qwen2-VL has the settings of its decoder beside those of its vision tower.
    whole = fields.section("thinker_config") if fields.has("thinker_config") else fields
    inner = whole.section("text_config") if whole.has("text_config") else whole
    decoder, model_type = decoders[inner.choice("model_type", next(iter(decoders)), decoders)]
    table = {**inner.table, **{name: fields.table[name] for name in SHARED if fields.has(name)}}
    for name in ("rope_parameters", "rope_scaling"):
        if name in table:
            table[name] = _of_text(inner.section(name).table)
    return decoder, Fields({**table, "model_type": model_type}, inner.origin)


def text_tensors(architecture: str, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of the text decoder by the names that it has alone.  architecture: that of config.json."""
    if architecture not in TEXT_PARTS:
        return stored
    kept, left_out = {}, Counter[str]()
    for name, tensor in stored.items():
        if found := LEFT_OUT.match(name):
            left_out[found[1]] += 1
            continue
        for pattern, replacement in RENAMED:
            name = pattern.sub(replacement, name)
        kept[name] = tensor
    parts = ", ".join(f"{count} tensors of {part}" for part, count in sorted(left_out.items()))
    log.info("%s: its text decoder is served; not read: %s", architecture, parts or "nothing")
    return kept


def _of_text(rotary: dict[str, Any]) -> dict[str, Any]:
    """Return rotary settings without those for places in an image: a text has the same position on each axis."""
    kinds = {name: "default" for name in ("type", "rope_type") if rotary.get(name) == "mrope"}
    return {name: value for name, value in (rotary | kinds).items() if not name.startswith("mrope_")}
