"""A case of the comparison of an attention backend, and the steps that cases are made of.

Owns: the fields of a case, the fewest cases that detect a backend that is wrong everywhere.
Does not know: tensors, the running of a case.
"""

from dataclasses import dataclass, replace
from typing import Literal

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
    chunked: bool = False
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
            "in chunks" if self.chunked else "",
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
    mixed = mixed_step(page_size)
    steps = (mixed, (mixed[0], ()), ((), new_prompts(page_size)))
    case = AttentionCase("mixed steps", steps, dtype, page_size, head_size, window=window, strided=True, layout=layout)
    case = replace(case, kv_dtype=kv_dtype)
    cases = [limited(case, phases), limited(replace(case, name="contiguous pages", contiguous=True), phases)]
    return [case for case in cases if case.steps]


def mixed_step(page_size: int) -> tuple[tuple[Sequence, ...], tuple[Sequence, ...]]:
    """Return decode rows and segments of all kinds, for one step."""
    return decode_rows(page_size), (*chunks(page_size), *new_prompts(page_size)[2:])


def limited(case: AttentionCase, phases: tuple[str, ...]) -> AttentionCase:
    """Return the case without the sequences that a backend of these phases never gets."""
    steps = (
        (rows if "decode" in phases else (), segments if "prefill" in phases else ()) for rows, segments in case.steps
    )
    return replace(case, steps=tuple(step for step in steps if any(step)))
