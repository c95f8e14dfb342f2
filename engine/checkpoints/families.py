"""Which model families there are: from the architecture name in config.json to the file that reads its shape.

To add a dense family, write ``engine/models/<family>.py`` with one function,

    def read_shape(fields: Fields) -> DecoderShape

that says how the family differs (see ``shape.read_dense`` for what can differ), and name it in ``FAMILIES``.
What a family needs beyond that, for example another norm, becomes a field of ``DecoderShape`` that
``decoder.py`` obeys, so that all families stay on one decoder.  ``tests/models/checkpoints.py`` wants a tiny
checkpoint of it, written by the reference implementation: the tests then compare logits.
"""

from collections.abc import Callable

from engine.checkpoints import llama, mistral, qwen2, qwen3
from engine.checkpoints.fields import Fields
from engine.checkpoints.shape import DecoderShape

FAMILIES: dict[str, Callable[[Fields], DecoderShape]] = {
    "LlamaForCausalLM": llama.read_shape,
    "MistralForCausalLM": mistral.read_shape,
    "Qwen2ForCausalLM": qwen2.read_shape,
    "Qwen3ForCausalLM": qwen3.read_shape,
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
