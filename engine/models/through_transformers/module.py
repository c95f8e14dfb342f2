"""A model class of transformers, made from config.json without reading or writing a weight.

Owns: which classes are accepted, how they are made, and what must be switched off.  Does not know: steps, checkpoints.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.layers.weights import parameter
from engine.models.through_transformers.attention import attend, stand_in_mask
from engine.types.errors import WeightsError

# Names of this engine's attention in transformers.  Under the second, which is also registered for masks, a layer gets
# a stand-in for its mask; under the first it gets no mask.
ATTENTION, ATTENTION_AND_MASKS = "callboard", "callboard_masks"
RANDOM = {"normal_", "uniform_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_"}
RANDOM |= {"xavier_normal_", "orthogonal_"}
STRETCHES = ("dynamic", "longrope")  # rotary embeddings that read the step's positions and may change by them

AttentionInterface.register(ATTENTION, attend)
AttentionInterface.register(ATTENTION_AND_MASKS, attend)
AttentionMaskInterface.register(ATTENTION_AND_MASKS, stand_in_mask)


class _Unwritten(TorchFunctionMode):
    """Leaves weights uninitialised: on a CPU, memory that is never written takes none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in RANDOM:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def make_module(architecture: str, config: dict[str, Any], device: torch.device) -> PreTrainedModel:
    """Make the model, with stand-ins for masks.  device: meta, or the CPU, where weights stay uninitialised.

    Raises WeightsError if transformers has no such class or its class does not take this configuration."""
    made = _make_config(architecture, config)
    if _has_alibi(made):
        what = "its scores are biased by distance (ALiBi, Press et al. 2022), which no attention backend here supports"
        raise WeightsError(f"{architecture} cannot be served: {what}")
    made._attn_implementation = ATTENTION_AND_MASKS
    if device.type == "meta":
        made._experts_implementation = "batched_mm"  # the one that does not read which experts were chosen
    try:
        with torch.no_grad(), _Unwritten(), device:
            module: PreTrainedModel = getattr(transformers, architecture)(made)
    except Exception as error:  # a class may raise any error for a configuration that it does not accept
        raise WeightsError(
            f"{architecture}: transformers cannot make it from this config.json: {_reason(error)}"
        ) from error
    for one in module.modules():
        _fix_rotary(one)
    return module.eval()


def max_len_of(module: PreTrainedModel) -> int:
    """Return the longest sequence in tokens.  With longrope, the original length: beyond it all keys would change."""
    config = module.config
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        raise WeightsError(
            f"{type(module).__name__}: config.json has max_position_embeddings={longest!r}, expected a number of tokens"
        )
    parameters = getattr(config, "rope_parameters", None) or {}
    for one in (parameters, *parameters.values()):
        if isinstance(one, dict) and one.get("rope_type") == "longrope":
            longest = min(longest, one.get("original_max_position_embeddings") or longest)
    return longest


def body_of(module: PreTrainedModel) -> PreTrainedModel:
    """Return the part that computes hidden states from token ids; the rest of the module is the head."""
    body: PreTrainedModel = module.get_decoder()
    parameters = inspect.signature(body.forward).parameters
    if body is module or "position_ids" not in parameters:
        raise WeightsError("it takes no positions, so its sequences cannot share a step")
    return body


def head_of(module: PreTrainedModel) -> nn.Linear:
    """Return the LM head."""
    head = module.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise WeightsError(f"its head is {type(head).__name__}, not one linear layer")
    return head


def tensors_of(module: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers that a checkpoint has, by the module's names; tied tensors come once."""
    yield from module.named_parameters()
    for prefix, one in module.named_modules():
        for name, buffer in one._buffers.items():
            if buffer is not None and name not in one._non_persistent_buffers_set:
                yield f"{prefix}.{name}", buffer


def allocate(module: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Give each parameter uninitialised memory of its own, and move the computed buffers to the device."""
    allocated: dict[int, nn.Parameter] = {}
    for prefix, one in module.named_modules():
        for name, tensor in one._parameters.items():
            if tensor is None:
                continue
            if id(tensor) not in allocated:
                kind = torch.float32 if _keeps_float32(module, f"{prefix}.{name}", dtype) else dtype
                allocated[id(tensor)] = parameter(*tensor.shape, device=device, dtype=kind)
            one._parameters[name] = allocated[id(tensor)]
        for name, buffer in one._buffers.items():
            one._buffers[name] = None if buffer is None else buffer.to(device)


def _keeps_float32(module: PreTrainedModel, name: str, dtype: torch.dtype) -> bool:
    """Return whether transformers would keep a parameter of a 16-bit model as float32."""
    kept = set(module._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        kept |= set(module._keep_in_fp32_modules or ())
    return not kept.isdisjoint(name.split("."))


@contextmanager
def refusals(architecture: str, what: str) -> Iterator[None]:
    """Turn any error of transformers into a refusal of the model."""
    try:
        yield
    except WeightsError as error:
        raise WeightsError(f"{architecture} cannot be served through transformers: {error}") from error
    except Exception as error:
        raise WeightsError(f"{architecture} cannot be served through transformers: {what}: {_reason(error)}") from error


def _make_config(architecture: str, table: dict[str, Any]) -> Any:
    kind = table.get("model_type")
    known = kind in CONFIG_MAPPING and MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) is not None
    if not known or not hasattr(transformers, architecture):
        raise WeightsError(
            f"{architecture} (model_type {kind!r}) is no causal language model of transformers "
            f"{transformers.__version__}, nor a family's; `callboard models` lists what is served. "
            "Code that a repository brings along is not run"
        )
    if architecture not in _classes(str(kind)):
        expected = " or ".join(_classes(str(kind)))
        raise WeightsError(f"{architecture}: not the causal language model of model_type {kind!r}, which is {expected}")
    # Quantization is the reader's work.  A deep copy, as transformers writes its own names into nested objects.
    given = {
        name: deepcopy(value)
        for name, value in table.items()
        if name not in ("quantization_config", "dtype", "torch_dtype")
    }
    try:
        return CONFIG_MAPPING[kind].from_dict(given)
    except Exception as error:
        raise WeightsError(f"{architecture}: transformers does not take its config.json: {_reason(error)}") from error


def _has_alibi(config: Any) -> bool:
    """Return whether a model has ALiBi: Bloom always, MPT and Falcon if their configurations enable it."""
    asked = getattr(config, "alibi", False) or getattr(getattr(config, "attn_config", None), "alibi", False)
    return bool(asked) or config.model_type == "bloom"


def _classes(kind: str) -> tuple[str, ...]:
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    return (names,) if isinstance(names, str) else tuple(names)


def _fix_rotary(module: nn.Module) -> None:
    """Fix a module's frequencies, constant within the served length, so that no step reads positions back."""
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, str) and kind in STRETCHES:
        module.rope_type = "default"  # type: ignore[assignment]
    elif isinstance(kind, dict):
        module.rope_type = {name: "default" if one in STRETCHES else one for name, one in kind.items()}  # type: ignore[assignment]


def _reason(error: Exception) -> str:
    if ATTENTION_AND_MASKS in str(error):
        return "its attention is not called through transformers' attention interface"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
