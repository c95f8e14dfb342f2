"""Facts about the model of a config.json: python -m engine.models.through_transformers.facts < REQUEST

REQUEST is [architecture, config.json] as JSON; stdout gets ``Facts`` as JSON, or {"error": ...}.

Owns: finding the facts on the meta device.  Does not know: weights, ranks.
"""

import sys
from typing import Any

import msgspec
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from engine.checkpoints.through_transformers import AttentionFacts, Facts
from engine.models.through_transformers.attention import Call, probe
from engine.models.through_transformers.module import body_of, head_of, make_module, max_len_of, refusals
from engine.models.through_transformers.names import in_checkpoint
from engine.types.errors import WeightsError

ATTENDING = {"full_attention", "sliding_attention"}  # kinds of layers that are served


def find_facts(architecture: str, config: dict[str, Any]) -> Facts:
    """Return the facts.  Raises WeightsError, naming the architecture, if transformers cannot serve it here."""
    module = make_module(architecture, config, torch.device("meta"))
    with refusals(architecture, "it cannot be run without weights"):
        _check_kinds(module)
        max_len = max_len_of(module)
        head, body = head_of(module), body_of(module)
        calls = probe(module, body, max_len)
        _check_calls(module, calls)
        embedding = module.get_input_embeddings()
        table = embedding.weight
        return Facts(
            vocab_size=table.shape[0],
            hidden_size=table.shape[1],
            max_len=max_len,
            width=_width(body),
            layers=tuple(_facts(one) for one in calls),
            tied=bool(head.weight is table),
            embedding=_stored_name(module, embedding),
            head=_stored_name(module, head),
            unread=tuple(sorted(module._keys_to_ignore_on_load_unexpected or ())),
        )


def _check_kinds(module: PreTrainedModel) -> None:
    """Check the kinds of layers; a configuration with recurrent layers lists them in ``layer_types``."""
    kinds = set(getattr(module.config, "layer_types", None) or ATTENDING)
    if strange := sorted(kinds - ATTENDING):
        raise WeightsError(f"it has layers of kind {', '.join(strange)}, not only {' and '.join(sorted(ATTENDING))}")


def _check_calls(module: PreTrainedModel, calls: tuple[Call, ...]) -> None:
    num_layers = module.config.get_text_config().num_hidden_layers
    if len(calls) != num_layers or len({id(one.module) for one in calls}) != num_layers:
        raise WeightsError(
            f"one forward pass calls transformers' attention interface {len(calls)} times for {num_layers} layers; "
            "layers without attention, or with attention of their own, are not served"
        )
    for what, seen in (
        ("numbers of heads", {one.num_heads for one in calls}),
        ("windows", {one.window for one in calls} - {0}),
        ("soft caps", {one.soft_cap for one in calls}),
        ("sinks", {one.sinks is None for one in calls}),
    ):
        if len(seen) > 1:
            raise WeightsError(f"its layers have different {what}: {', '.join(map(str, sorted(seen)))}")
    if any(one.value_size > one.head_size for one in calls):
        raise WeightsError("its values are wider than its keys")
    numbers = {one.num_kv_heads for one in calls}
    if any(max(numbers) % one for one in numbers):
        raise WeightsError(f"its layers have {', '.join(map(str, sorted(numbers)))} key/value heads, no multiples")


def _facts(call: Call) -> AttentionFacts:
    return AttentionFacts(
        num_heads=call.num_heads,
        num_kv_heads=call.num_kv_heads,
        head_size=call.head_size,
        scale=call.scale,
        window=call.window,
        soft_cap=call.soft_cap,
        sinks=call.sinks is not None,
    )


def _width(body: nn.Module) -> int:
    """Return the outputs of the widest product in a layer; an expert counts as it is stored, not per token."""
    widths = [one.shape[-2] for one in body.parameters() if one.dim() == 3]
    return max([*widths, *(one.out_features for one in body.modules() if isinstance(one, nn.Linear)), 1])


def _stored_name(module: PreTrainedModel, part: nn.Module) -> str:
    name = next(name for name, one in module.named_modules() if one is part)
    (stored,) = in_checkpoint(module, {f"{name}.weight": part.get_parameter("weight")})
    return stored.removesuffix(".weight")


def main() -> None:
    """Read a request from stdin and write the answer to stdout."""
    logging.set_verbosity_error()
    architecture, config = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[str, dict[str, Any]])
    try:
        answer: Any = find_facts(architecture, config)
    except WeightsError as error:
        answer = {"error": str(error)}
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
