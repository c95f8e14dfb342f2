"""The steps that an attention backend is checked with, derived from its declaration.

Owns: the list of cases.  Does not know: tensors, the running of a case.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from engine.plugins.declaration import Declaration, Multiples, Sizes

HEAD_SIZES = (64, 80, 96, 128, 256)
PAGE_SIZES = (1, 16, 64, 256)
RATIOS = (1, 2, 4, 5, 8)
DTYPES = ("float32", "bfloat16", "float16")
Layout = Literal["layer_first", "page_first"]
Sequence = tuple[int, int]  # context length including the new tokens, new tokens


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One backend, and the steps that it runs in order over one pool.

    steps: each is (decode rows, segments of prompts).  contiguous: pages are adjacent; if not, scattered.
    num_padding: decode rows of length 0 after the others.  strided: the queries are a slice of a wider tensor.
    layout, kv_dtype: of the pool.
    loud: queries so large that an exponential overflows unless the largest score is subtracted first.
    """

    name: str
    steps: tuple[tuple[tuple[Sequence, ...], tuple[Sequence, ...]], ...]
    dtype: str
    page_size: int
    head_size: int
    num_kv_heads: int = 2
    ratio: int = 2
    window: int = 0
    first_window_layer: int = 0
    full_layers: tuple[int, ...] = ()
    soft_cap: float = 0.0
    sinks: bool = False
    latent_size: int = 0
    contiguous: bool = False
    num_padding: int = 0
    strided: bool = False
    loud: bool = False
    layout: Layout = "layer_first"
    kv_dtype: str = ""

    def __str__(self) -> str:
        heads = f"{self.ratio * self.num_kv_heads}/{self.num_kv_heads} heads of {self.head_size}"
        extras = [
            f"window {self.window} from layer {self.first_window_layer}" if self.window else "",
            f"layers {self.full_layers} without it" if self.full_layers else "",
            f"scores capped at {self.soft_cap:g}" if self.soft_cap else "",
            "sinks" if self.sinks else "",
            f"latents of {self.latent_size}" if self.latent_size else "",
            "contiguous pages" if self.contiguous else "",
            f"{self.num_padding} padding rows" if self.num_padding else "",
            "strided queries" if self.strided else "",
            "large scores" if self.loud else "",
            "page-first" if self.layout == "page_first" else "",
            f"{self.kv_dtype} pages" if self.kv_dtype else "",
        ]
        return ", ".join([self.name, self.dtype, heads, f"page {self.page_size}", *filter(None, extras)])


def decode_rows(page_size: int) -> tuple[Sequence, ...]:
    """Return sequences with one new token each; contexts end just before, at and just after the end of a page."""
    lengths = (1, page_size - 1, page_size, page_size + 1, 2 * page_size, 3 * page_size + 2)
    return tuple((length, 1) for length in lengths if length)


def new_prompts(page_size: int) -> tuple[Sequence, ...]:
    """Return whole prompts, ragged; the first has a single token."""
    return tuple((length, length) for length in (1, page_size, page_size + 1, 2 * page_size + 3))


def chunks(page_size: int) -> tuple[Sequence, ...]:
    """Return parts of prompts after cached context: a page of new tokens, one token, a part across a page's end."""
    return ((3 * page_size + 2, page_size), (2 * page_size, 1), (page_size + 5, 7 if page_size > 1 else 5))


def attention_cases(declares: Declaration) -> list[AttentionCase]:
    """Return the cases for everything that a backend declares; sizes without a limit are varied widely."""
    limited = (_limited(case, declares.phases) for case in _cases(declares))
    return [case for case in limited if case.steps]


def trial_cases(
    dtype: str,
    page_size: int,
    head_size: int,
    window: int,
    phases: tuple[str, ...],
    layout: Layout = "layer_first",
    kv_dtype: str = "",
) -> list[AttentionCase]:
    """Return the fewest cases that detect a backend that is wrong everywhere; the caller sets the heads."""
    mixed = _mixed(page_size)
    steps = (mixed, (mixed[0], ()), ((), new_prompts(page_size)))
    case = AttentionCase("mixed steps", steps, dtype, page_size, head_size, window=window, strided=True, layout=layout)
    case = replace(case, kv_dtype=kv_dtype)
    cases = [_limited(case, phases), _limited(replace(case, name="contiguous pages", contiguous=True), phases)]
    return [case for case in cases if case.steps]


def _cases(declares: Declaration) -> Iterator[AttentionCase]:
    dtypes = [dtype for dtype in DTYPES if not declares.dtypes or dtype in declares.dtypes]
    head_sizes = _sizes(declares.head_sizes, HEAD_SIZES)
    page_sizes = _sizes(declares.page_sizes, PAGE_SIZES)
    ratios = _sizes(declares.heads_per_kv_head, RATIOS)
    page_size = 16 if 16 in page_sizes else page_sizes[0]
    mixed = _mixed(page_size)
    base = AttentionCase(
        name="mixed",
        steps=(mixed,),
        dtype=dtypes[0],
        page_size=page_size,
        head_size=head_sizes[0],
        ratio=2 if 2 in ratios else ratios[0],
    )
    for contiguous in (False, True):
        yield replace(base, name="decode", steps=((mixed[0], ()),), contiguous=contiguous)
        yield replace(base, name="prefill", steps=(((), new_prompts(page_size)),), contiguous=contiguous)
        yield replace(base, name="chunked prefill", steps=(((), chunks(page_size)),), contiguous=contiguous)
        yield replace(base, contiguous=contiguous)
    # Long enough that kernels split a context, with far shorter rows next to it.
    rows, segments = ((650, 1), *((3 + row, 1) for row in range(16))), ((300, 290), (260, 2))
    yield replace(base, name="long and short", steps=((rows, segments),))
    yield replace(base, name="one row", steps=((((page_size + 1, 1),), ()),))
    steps = (mixed, (mixed[0][-1:], ()), ((), chunks(page_size)), (mixed[0], ()), ((), new_prompts(page_size)), mixed)
    yield replace(base, name="several steps", steps=steps)
    yield replace(base, strided=True)
    yield replace(base, loud=True)
    yield from (replace(base, dtype=dtype, strided=True) for dtype in dtypes[1:])
    yield from (replace(base, head_size=head_size) for head_size in head_sizes[1:])
    yield from (replace(base, ratio=ratio) for ratio in ratios if ratio != base.ratio)
    yield replace(base, num_kv_heads=1, ratio=ratios[-1])
    yield from (replace(base, page_size=size, steps=(_mixed(size),)) for size in page_sizes if size != page_size)
    if declares.window:
        for window in (1, 7, page_size, 2 * page_size + 1):
            yield replace(base, window=window)
        yield replace(base, window=page_size + 3, first_window_layer=1)
    if "page_first" in declares.kv_layouts:
        first = replace(base, layout="page_first")
        yield replace(first, name="several steps", steps=steps)
        yield replace(first, contiguous=True)
        yield from (replace(first, page_size=size, steps=(_mixed(size),)) for size in (page_sizes[0], page_sizes[-1]))
        if declares.window:
            yield replace(first, window=page_size + 3, first_window_layer=1)
        if declares.padding:
            yield replace(first, name="padded decode", steps=((mixed[0], ()),), num_padding=3)
    for kv_dtype in sorted({*declares.kv_dtypes} - {*declares.rounded_queries}):  # the others are less exact
        yield from _pages_of(kv_dtype, replace(base, name="several steps", steps=steps), declares)
    window = page_size + 3 if declares.window else 0
    if "layer_windows" in declares.supports and declares.window:
        yield replace(base, window=window, full_layers=(1,))
    if "soft_cap" in declares.supports:
        yield replace(base, soft_cap=2.0, window=window)
        yield replace(base, soft_cap=30.0, loud=True)
    if "sinks" in declares.supports:
        yield from (replace(base, sinks=True, window=one) for one in {0, window})
    if "latents" in declares.supports:
        # One KV head for all query heads, whose last numbers are not values; DeepSeek's size, and a small one.
        latents = replace(base, head_size=576, latent_size=512, num_kv_heads=1, ratio=3)
        yield replace(latents, name="decode", steps=((mixed[0], ()),), dtype=dtypes[-1])
        yield replace(latents, name="chunked prefill", steps=(((), chunks(page_size)),))
        small = replace(latents, head_size=24, latent_size=16)
        yield replace(small, name="one row", steps=((((page_size + 1, 1),), ()),), ratio=20, strided=True)
        layout: Layout = "page_first" if "page_first" in declares.kv_layouts else "layer_first"
        yield replace(small, layout=layout, contiguous=True, ratio=2)
    if declares.padding:
        yield replace(base, name="padded decode", steps=((mixed[0], ()),), num_padding=3)


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


def _mixed(page_size: int) -> tuple[tuple[Sequence, ...], tuple[Sequence, ...]]:
    return decode_rows(page_size), (*chunks(page_size), *new_prompts(page_size)[2:])


def _sizes(declared: Sizes, usual: tuple[int, ...]) -> list[int]:
    """Return the usual sizes that are declared; if none is, the declared ones."""
    if not declared:
        return list(usual)
    among = [size for size in usual if size in declared]
    if among:
        return among
    return [declared.multiple_of] if isinstance(declared, Multiples) else list(declared)


def _limited(case: AttentionCase, phases: tuple[str, ...]) -> AttentionCase:
    """Return the case without the parts that a backend of one phase never gets."""
    steps = (
        (rows if "decode" in phases else (), segments if "prefill" in phases else ()) for rows, segments in case.steps
    )
    return replace(case, steps=tuple(step for step in steps if any(step)))
