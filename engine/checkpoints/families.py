"""Which model families there are: from the architecture's name in config.json to the function that reads its shape.

Owns: what each family's config.json says differently.  Does not know: torch, weights.

To add a dense family, write a function as those below (see ``shape.read_dense`` for what can differ), and name it in
``FAMILIES``.  What a family needs beyond that, for example another norm, becomes a field of ``DecoderShape`` that the
one decoder of all families obeys, ``engine/models/decoder.py``.  ``tests/models/checkpoints.py`` wants a tiny
checkpoint of the family, written by the reference implementation: the tests then compare logits.
"""

from collections.abc import Callable

from engine.checkpoints.fields import Fields
from engine.checkpoints.shape import DecoderShape, read_dense

MIN_WINDOW = 2  # in one of 1 a query would see itself alone, and transformers' cache then keeps everything


def llama(fields: Fields) -> DecoderShape:
    """Llama 2, 3, 3.1, 3.2: the plain dense decoder, with optional biases and llama3-scaled rotary frequencies.

    attention_bias covers q, k, v and the output projection alike."""
    max_len = fields.integer("max_position_embeddings")
    for name in ("sliding_window", "attention_chunk_size"):
        # transformers 5 masks nothing by it, but lets its cache forget: what it computes depends on how it is asked.
        if (window := fields.integer(name, max_len)) < max_len:
            raise fields.error(name, window, "null: every layer of a Llama sees the whole context")
    bias = fields.flag("attention_bias", False)
    return read_dense(fields, qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias", False))


def mistral(fields: Fields) -> DecoderShape:
    """Mistral and Ministral 7B style models: Llama with a sliding window on every layer and no biases.

    A null sliding_window is full attention; a missing one is the family's default of 4096."""
    window = fields.integer("sliding_window", 4096, minimum=MIN_WINDOW)
    if "sliding_window" in fields.table and not fields.has("sliding_window"):
        window = 0
    return read_dense(fields, num_kv_heads=8, window=window)


def qwen2(fields: Fields) -> DecoderShape:
    """Qwen2 and Qwen2.5: Llama with biases on q, k and v, and an optional sliding window on the upper layers.

    The biases are not configurable: every checkpoint of the family has them."""
    window, first_window_layer = _qwen_window(fields)
    return read_dense(fields, qkv_bias=True, window=window, first_window_layer=first_window_layer)


def qwen3(fields: Fields) -> DecoderShape:
    """Qwen3 dense: query and key heads are normalised before rotation, and a head's size is its own setting.

    attention_bias covers q, k, v and the output projection alike."""
    window, first = _qwen_window(fields)
    bias = fields.flag("attention_bias", False)
    return read_dense(
        fields, head_size=128, qkv_bias=bias, output_bias=bias, qk_norm=True, window=window, first_window_layer=first
    )


def _qwen_window(fields: Fields) -> tuple[int, int]:
    """(window, first layer that has it); (0, 0) when it is switched off."""
    if not fields.flag("use_sliding_window", False) or not fields.has("sliding_window"):
        return 0, 0
    window = fields.integer("sliding_window", minimum=MIN_WINDOW)
    return window, fields.integer("max_window_layers", 28, minimum=0)


FAMILIES: dict[str, Callable[[Fields], DecoderShape]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
}


def read_shape(architecture: str, fields: Fields) -> DecoderShape:
    """The shape of a checkpoint.  Raises WeightsError for an unknown architecture, naming those that are known."""
    if architecture not in FAMILIES:
        raise fields.error("architectures", architecture, f"one of {', '.join(sorted(FAMILIES))}")
    # transformers goes by the one or the other, depending on how it is asked; a file that says both means both.
    family = architecture.removesuffix("ForCausalLM").lower()
    if (model_type := fields.text("model_type", family)) != family:
        raise fields.error("model_type", model_type, f'"{family}", since architectures names {architecture}')
    return FAMILIES[architecture](fields)
