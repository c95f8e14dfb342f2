"""Attention calls of a model of transformers, answered by this engine, and a probe of what they need.

transformers calls ``attend`` with the attention module, whose attribute ``callboard`` holds the function that answers.

Legend: T tokens of the step (ragged, packed) · Q query heads · G key/value heads · H head size · V size of a value head
Owns: what a call's arguments mean, and which calls can be answered.  Does not know: which model it is, backends.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.types.errors import WeightsError

ANSWERER = "callboard"
# Arguments that change nothing for a model that is not trained.
IDLE = {
    "dropout",
    "position_ids",
    "position_embeddings",
    "use_cache",
    "output_attentions",
    "cache_position",
    "training",
}
IDLE |= {
    "output_hidden_states",
    "output_router_logits",
    "logits_to_keep",
    "past_key_values",
    "layer_idx",
    "return_dict",
}
NUM_PROBED = 3  # tokens of the forward pass whose calls are counted

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of attention on this rank.  value_size: V.  window: 0 for all.  sinks: as in ``AttentionSpec``."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    scale: float
    window: int
    soft_cap: float
    sinks: Tensor | None


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Answer a call of transformers: return [1, T, Q, V] for q [1, Q, T, H], k [1, G, T, H] and v [1, G, T, V]."""
    return module.__dict__[ANSWERER](module, query, key, value, attention_mask, **options), None


class StandInMask:
    """A stand-in for a mask: the function of indices that would fill it.  A model may only pass it on."""

    def __init__(self, function: MaskFunction) -> None:
        self.function = function

    def __getattr__(self, name: str) -> Any:
        raise WeightsError("it computes with its masks, which are not made here")

    def __getitem__(self, place: Any) -> "StandInMask":
        """Return the same mask for a slice of all of it."""
        if all(one == slice(None) or one == slice(0, None) for one in place):
            return self
        return self.__getattr__("__getitem__")

    __radd__ = __add__ = __getattr__


def stand_in_mask(*, mask_function: MaskFunction, **_: Any) -> StandInMask:
    """Return the stand-in for a mask; registered with transformers in place of its mask builder."""
    return StandInMask(mask_function)


def probe(model: nn.Module, body: nn.Module, max_len: int) -> tuple[Call, ...]:
    """Return the calls of one forward pass, in order.  model: on the meta device, with stand-ins for masks.

    Raises WeightsError for a call that no attention backend here can answer, and whatever the model raises."""
    calls: list[Call] = []

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: Any = None, **options: Any
    ) -> Tensor:
        calls.append(_read_call(module, query, key, value, mask, scaling, options, max_len))
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])

    modules = list(body.modules())
    for one in modules:
        one.__dict__[ANSWERER] = record
    try:
        ids = torch.zeros((1, NUM_PROBED), dtype=torch.int64, device="meta")
        with torch.no_grad():
            # With a mask of ones: without a mask, transformers looks for several sequences in the positions.
            model(input_ids=ids, position_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    finally:
        for one in modules:
            del one.__dict__[ANSWERER]
    return tuple(calls)


def _read_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float | None,
    options: dict[str, Any],
    max_len: int,
) -> Call:
    soft_cap, sinks = options.pop("softcap", None), options.pop("s_aux", None)
    window = window_of(mask, options.pop("sliding_window", None) or 0, max_len)
    causal = options.pop("is_causal", None)
    if causal is False or (mask is None and getattr(module, "is_causal", True) is False):
        raise WeightsError("its attention is not causal")
    if unknown := [name for name, given in options.items() if given is not None and name not in IDLE]:
        raise WeightsError(f"its attention needs {', '.join(unknown)}, which no backend here supports")
    expected = (1, NUM_PROBED)
    if {(one.shape[0], one.shape[2]) for one in (query, key, value)} != {expected} or key.shape[1] != value.shape[1]:
        shapes = " and ".join(str(list(one.shape)) for one in (query, key, value))
        raise WeightsError(f"its attention is not one of the step's own tokens: {shapes}")
    return Call(
        module=module,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_size=query.shape[-1],
        value_size=value.shape[-1],
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=window,
        soft_cap=float(soft_cap or 0.0),
        sinks=sinks,
    )


def window_of(mask: Any, claimed: int, max_len: int) -> int:
    """Return a mask's sliding window; 0 if it is causal.  claimed: the call's own window, used if there is no mask.

    Raises WeightsError for any other mask."""
    if mask is None:
        return claimed if claimed < max_len else 0
    if not isinstance(mask, StandInMask):
        raise WeightsError(f"it makes masks of its own ({type(mask).__name__})")
    keys, windows = torch.arange(max_len), set()
    for query in {max_len - 1, max_len // 2, min(2, max_len - 1)}:
        seen = _row(mask.function, query, keys)
        width = int(seen.sum())
        if not width or not torch.equal(seen, (keys <= query) & (keys > query - width)):
            raise WeightsError("its masks are neither causal nor those of a sliding window")
        windows |= {width} if width <= query else set()
    if len(windows) > 1:
        widths = " and ".join(map(str, sorted(windows)))
        raise WeightsError(f"its masks let different tokens see {widths} tokens, which is no sliding window")
    return windows.pop() if windows else 0


def _row(mask: MaskFunction, query: int, keys: Tensor) -> Tensor:
    """Return which keys a query sees, [len(keys)]."""
    zero = torch.zeros((), dtype=torch.int64)
    seen = mask(zero, zero, torch.tensor(query), keys)
    if seen.device.type == "meta":
        raise WeightsError("its masks depend on the content of the batch, or on chunks")
    return seen.broadcast_to(keys.shape)
