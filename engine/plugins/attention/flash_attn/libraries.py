"""The installed builds of FlashAttention, and the choice of one that can run here.

Owns: the order in which they are tried, and their rules.  Does not know: the arguments of their functions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

# Upstream's own builds of FA3, under two names, and the one in SGLang's kernels.
FA3_MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface", "sgl_kernel.flash_attn")
FA2_MODULES = ("flash_attn",)
HOPPER = 9
FA2_PAGE = 256
# Keys that one block of FA3 works on at a time, by the largest head size that this holds for; several if it depends on
# more than the head size.  If the page size is a multiple of the tile, pages are read whole.
FA3_KEY_TILES = {64: (128,), 96: (128, 144), 128: (128,), 192: (96, 112, 128), 256: (64, 80)}
FA3_KEY_TILES_FP8 = {64: (160,), 96: (128,), 128: (160, 192, 224), 192: (128, 160), 256: (64, 128)}
# The same by the size of a latent with its rotated part.
FA3_LATENT_TILES = {320: 112, 576: 64}
# Builds with attention sinks.
WITH_SINKS = ("sgl_kernel.flash_attn",)
FP8_ALIGNMENT = 16
# Up to this head size FA3 uses the same tiles of keys whether or not a window hides any key of a step.
WINDOW_ALIKE = 192


@dataclass(frozen=True, slots=True)
class Library:
    """A module with the required functions.  scheduler_metadata: None for FA2 and for early builds of FA3."""

    generation: int
    module: str
    version: str
    with_kvcache: Callable[..., Any]
    varlen: Callable[..., Any] | None
    scheduler_metadata: Callable[..., Any] | None


@dataclass(frozen=True, slots=True)
class Situation:
    """The inputs of the rules.

    whole_pages: FA3 may read slots that were never written, as described in ``refusal``.
    kv_dtype: of pages, '' for the queries' own.  invariant: as in ``AttentionContext``.
    window: whether layers have one.  needs: as in ``AttentionContext``."""

    hopper: bool
    page_size: int
    head_size: int
    whole_pages: bool
    kv_dtype: str = ""
    invariant: bool = False
    window: bool = False
    needs: tuple[str, ...] = ()


def find(generations: Sequence[int], situation: Situation) -> tuple[Library | None, list[str]]:
    """Return the first library that can serve, or None, and the reasons against those before it."""
    reasons = []
    for generation in generations:
        if reason := refusal(generation, situation):
            reasons.append(reason)
            continue
        for module in FA3_MODULES if generation == 3 else FA2_MODULES:
            if "sinks" in situation.needs and module not in WITH_SINKS:
                reasons.append(f"{module} has no attention sinks")
                continue
            try:
                return load(generation, module), reasons
            except Exception as error:  # a library for another CUDA may raise any error
                reasons.append(f"{module}: {' '.join(str(error).split())[:200]}")
    return None, reasons


def load(generation: int, module: str) -> Library:
    """Return the library in a module.  Raises any error of the import, and AttributeError if it lacks a function."""
    library = import_module(module)
    return Library(
        generation=generation,
        module=module,
        version=getattr(import_module(module.partition(".")[0]), "__version__", "?"),
        with_kvcache=library.flash_attn_with_kvcache,
        varlen=library.flash_attn_varlen_func if generation == 2 else None,
        scheduler_metadata=getattr(library, "get_scheduler_metadata", None) if generation == 3 else None,
    )


def refusal(generation: int, situation: Situation) -> str:
    """Return why a generation cannot serve, or ''.

    If the page size is a multiple of the key tile, FA3 reads all slots of a page.  Unwritten slots have a weight of 0,
    but 0 times NaN is NaN, and a previous sequence may have left a NaN in the page.
    """
    size = situation.page_size
    if generation == 2 and {"latents", "sinks"} & {*situation.needs}:
        return "FA2 has no latents and no sinks"
    if generation == 2 and situation.kv_dtype:
        return f"FA2 does not read {situation.kv_dtype} pages"
    if generation == 2 and situation.invariant:
        return "FA2 splits the keys of a decode row depending on the rest of a step"
    if generation == 2:
        return "" if size % FA2_PAGE == 0 else f"FA2 needs pages of a multiple of {FA2_PAGE} tokens"
    if not situation.hopper:
        return "FA3 is for Hopper GPUs"
    if "latents" in situation.needs:
        if situation.kv_dtype:
            return f"FA3 reads latents in 16 bits alone, not in {situation.kv_dtype}"
        return whole_page_refusal(situation, (FA3_LATENT_TILES[situation.head_size],))
    if situation.invariant and situation.window and situation.head_size > WINDOW_ALIKE:
        return f"FA3 uses other tiles for windows of heads above {WINDOW_ALIKE} once a step has a longer context"
    if situation.kv_dtype and situation.head_size % FP8_ALIGNMENT:
        return f"FA3 reads {situation.kv_dtype} pages only with head sizes of a multiple of {FP8_ALIGNMENT}"
    by_head_size = FA3_KEY_TILES_FP8 if situation.kv_dtype else FA3_KEY_TILES
    return whole_page_refusal(
        situation, next(tiles for head_size, tiles in by_head_size.items() if situation.head_size <= head_size)
    )


def whole_page_refusal(situation: Situation, tiles: tuple[int, ...]) -> str:
    """Return why FA3 cannot serve pages of this size with such tiles of keys, or ''."""
    for tile in tiles:
        if situation.page_size % tile == 0 and not situation.whole_pages:
            return f"FA3 may read unwritten slots of pages of a multiple of {tile} tokens (see option whole_pages)"
    return ""
