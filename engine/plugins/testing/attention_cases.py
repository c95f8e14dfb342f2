"""The steps that an attention backend is checked with, derived from its declaration.

Owns: the list of cases.  Does not know: tensors, the running of a case.
"""

from collections.abc import Iterator
from dataclasses import replace

from engine.plugins.declaration import Declaration, Multiples, Sizes
from engine.plugins.proof.attention_cases import (
    AttentionCase,
    Layout,
    chunks,
    decode_rows,
    limited,
    mixed_step,
    new_prompts,
)

HEAD_SIZES = (64, 80, 96, 128, 256)
PAGE_SIZES = (1, 16, 64, 256)
RATIOS = (1, 2, 4, 5, 8)
DTYPES = ("float32", "bfloat16", "float16")


def attention_cases(declares: Declaration) -> list[AttentionCase]:
    """Return the cases for everything that a backend declares; sizes without a limit are varied widely."""
    # Of a backend for latents alone, heads have the sizes of these.
    alone = bool(declares.head_sizes) and list(map(sum, declares.latent_sizes)) == _sizes(declares.head_sizes, ())
    cases = (limited(case, declares.phases) for case in _cases(declares) if case.latent_size or not alone)
    return [case for case in cases if case.steps]


def _cases(declares: Declaration) -> Iterator[AttentionCase]:
    dtypes = [dtype for dtype in DTYPES if not declares.dtypes or dtype in declares.dtypes]
    page_sizes = _sizes(declares.page_sizes, PAGE_SIZES)
    ratios = _sizes(declares.heads_per_kv_head, RATIOS)
    page_size = 16 if 16 in page_sizes else page_sizes[0]
    mixed = mixed_step(page_size)
    base = AttentionCase(
        name="mixed",
        steps=(mixed,),
        dtype=dtypes[0],
        page_size=page_size,
        head_size=_sizes(declares.head_sizes, HEAD_SIZES)[0],
        ratio=2 if 2 in ratios else ratios[0],
    )
    steps = (mixed, (mixed[0][-1:], ()), ((), chunks(page_size)), (mixed[0], ()), ((), new_prompts(page_size)), mixed)
    several = replace(base, name="several steps", steps=steps)
    yield from _kinds_of_steps(base)
    yield several
    yield replace(base, strided=True)
    yield replace(base, loud=True)
    yield from (replace(base, dtype=dtype, strided=True) for dtype in dtypes[1:])
    yield from _sizes_of_heads_and_pages(base, declares, page_sizes, ratios)
    if declares.window:
        for window in (1, 7, page_size, 2 * page_size + 1):
            yield replace(base, window=window)
        yield replace(base, window=page_size + 3, first_window_layer=1)
    if "page_first" in declares.kv_layouts:
        yield from _page_first(several, base, declares, page_sizes)
    for kv_dtype in sorted({*declares.kv_dtypes} - {*declares.rounded_queries}):  # the others are less exact
        yield from _pages_of(kv_dtype, several, declares)
    yield from _kinds_of_scores(base, declares)
    if "latents" in declares.supports:
        yield from _latents(base, declares, dtypes[-1])
    if declares.padding:
        yield replace(base, name="padded decode", steps=((mixed[0], ()),), num_padding=3)


def _kinds_of_steps(base: AttentionCase) -> Iterator[AttentionCase]:
    page_size = base.page_size
    for contiguous in (False, True):
        yield replace(base, name="decode", steps=((decode_rows(page_size), ()),), contiguous=contiguous)
        yield replace(base, name="prefill", steps=(((), new_prompts(page_size)),), contiguous=contiguous)
        yield replace(base, name="chunked prefill", steps=(((), chunks(page_size)),), contiguous=contiguous)
        yield replace(base, contiguous=contiguous)
    # Long enough that kernels split a context, with far shorter rows next to it.
    rows, segments = ((650, 1), *((3 + row, 1) for row in range(16))), ((300, 290), (260, 2))
    yield replace(base, name="long and short", steps=((rows, segments),))
    yield replace(base, name="one row", steps=((((page_size + 1, 1),), ()),))


def _sizes_of_heads_and_pages(
    base: AttentionCase, declares: Declaration, page_sizes: list[int], ratios: list[int]
) -> Iterator[AttentionCase]:
    yield from (replace(base, head_size=head_size) for head_size in _sizes(declares.head_sizes, HEAD_SIZES)[1:])
    yield from (replace(base, ratio=ratio) for ratio in ratios if ratio != base.ratio)
    yield replace(base, num_kv_heads=1, ratio=ratios[-1])
    for size in page_sizes:
        if size != base.page_size:
            yield replace(base, page_size=size, steps=(mixed_step(size),))


def _page_first(
    several: AttentionCase, base: AttentionCase, declares: Declaration, page_sizes: list[int]
) -> Iterator[AttentionCase]:
    """Yield cases of a pool whose pages hold all layers."""
    first = replace(base, layout="page_first")
    yield replace(several, layout="page_first")
    yield replace(first, contiguous=True)
    for size in (page_sizes[0], page_sizes[-1]):
        yield replace(first, page_size=size, steps=(mixed_step(size),))
    if declares.window:
        yield replace(first, window=base.page_size + 3, first_window_layer=1)
    if declares.padding:
        yield replace(first, name="padded decode", steps=((decode_rows(base.page_size), ()),), num_padding=3)


def _kinds_of_scores(base: AttentionCase, declares: Declaration) -> Iterator[AttentionCase]:
    window = base.page_size + 3 if declares.window else 0
    if "layer_windows" in declares.supports and declares.window:
        yield replace(base, window=window, full_layers=(1,))
    if "chunks" in declares.supports and declares.window:
        yield replace(base, window=2 * base.page_size, chunked=True, full_layers=(1,))
    if "soft_cap" in declares.supports:
        yield replace(base, soft_cap=2.0, window=window)
        yield replace(base, soft_cap=30.0, loud=True)
    if "sinks" in declares.supports:
        yield from (replace(base, sinks=True, window=one) for one in {0, window})


def _latents(base: AttentionCase, declares: Declaration, dtype: str) -> Iterator[AttentionCase]:
    """Yield cases of one KV head for all query heads, whose last numbers are not values; DeepSeek's size, and small."""
    page_size = base.page_size
    sizes = declares.latent_sizes or ((512, 64), (16, 8))
    (latent, rotated), (small_latent, small_rotated) = sizes[0], sizes[-1]
    latents = replace(base, head_size=latent + rotated, latent_size=latent, num_kv_heads=1, ratio=3)
    yield replace(latents, name="decode", steps=((decode_rows(page_size), ()),), dtype=dtype)
    yield replace(latents, name="chunked prefill", steps=(((), chunks(page_size)),))
    small = replace(latents, head_size=small_latent + small_rotated, latent_size=small_latent)
    yield replace(small, name="one row", steps=((((page_size + 1, 1),), ()),), ratio=20, strided=True)
    layout: Layout = "page_first" if "page_first" in declares.kv_layouts else "layer_first"
    yield replace(small, layout=layout, contiguous=True, ratio=2)
    if declares.padding:
        yield replace(small, name="padded decode", steps=((decode_rows(page_size), ()),), num_padding=3)


def _pages_of(kv_dtype: str, base: AttentionCase, declares: Declaration) -> Iterator[AttentionCase]:
    """Yield cases of a pool whose pages keep another type than the queries'."""
    others = [dtype for dtype in DTYPES if dtype != kv_dtype and (not declares.dtypes or dtype in declares.dtypes)]
    for dtype in others:
        yield replace(base, dtype=dtype, kv_dtype=kv_dtype)
    base = replace(base, dtype=others[0], kv_dtype=kv_dtype)
    yield replace(base, contiguous=True)
    yield replace(base, loud=True)
    if declares.window:
        yield replace(base, window=base.page_size + 3, first_window_layer=1)
    if "page_first" in declares.kv_layouts:
        yield replace(base, layout="page_first")
    if "sinks" in declares.supports:
        yield replace(base, sinks=True)


def _sizes(declared: Sizes, usual: tuple[int, ...]) -> list[int]:
    """Return the usual sizes that are declared; if none is, the declared ones."""
    if not declared:
        return list(usual)
    among = [size for size in usual if size in declared]
    if among:
        return among
    return [declared.multiple_of] if isinstance(declared, Multiples) else list(declared)
