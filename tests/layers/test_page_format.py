"""What pages keep: the rounding of each type, its bytes, and a pool that reads what was stored."""

import math

import pytest
import torch
from torch import Tensor

from engine.layers.kv_pool import KVPool, Layout
from engine.layers.page_format import STORED, PageFormat
from engine.settings.sections import KVSection
from engine.types.errors import ConfigError

CPU = torch.device("cpu")
HEADS, HEAD_SIZE = 3, 8
# Of the largest number of a vector for int8; of each number for the others: half of a unit in the last place.
ROUNDING = {"float32": 0.0, "bfloat16": 2**-8, "float16": 2**-11, "int8": 0.5 / 127, "fp8_e4m3": 2**-4}
FORMATS = [(dtype, kv_dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16) for kv_dtype in STORED]


def drawn(num_tokens: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Vectors of sizes that differ a lot from head to head; a part of a wider tensor."""
    wide = torch.randn((num_tokens, HEADS + 2, HEAD_SIZE), generator=torch.Generator().manual_seed(0))
    return (wide * torch.tensor([1.0, 0.1, 30.0, 1.0, 1.0])[:, None] * scale).to(dtype)[:, :HEADS]


def through(form: PageFormat, x_TGH: Tensor) -> Tensor:
    records = form.encode(x_TGH)
    assert records.dtype == form.memory
    assert records.shape[-1] == form.record_size(HEAD_SIZE)
    return form.decode(records, torch.empty(x_TGH.shape, dtype=form.dtype))


@pytest.mark.parametrize(("dtype", "kv_dtype"), FORMATS)
def test_what_comes_back_is_off_by_one_rounding_at_most(dtype: torch.dtype, kv_dtype: str) -> None:
    x_TGH = drawn(50, dtype)
    found = through(PageFormat(dtype, kv_dtype), x_TGH).double()
    exact = x_TGH.double()
    size = exact.abs().amax(-1, keepdim=True) if kv_dtype == "int8" else exact.abs()
    smallest = 2**-9 if kv_dtype == "fp8_e4m3" else 1e-6  # of what is nearly zero
    own = 2 * torch.finfo(dtype).eps  # the scale's product is rounded to the model's type
    assert ((found - exact).abs() <= size * (ROUNDING[kv_dtype] * 1.001 + own) + smallest / 2).all()
    if ROUNDING[kv_dtype] > torch.finfo(dtype).eps:
        assert not torch.equal(found, exact), "nothing was rounded"


@pytest.mark.parametrize("kv_dtype", STORED)
def test_zeros_stay_zeros_and_nan_stays_nan(kv_dtype: str) -> None:
    form = PageFormat(torch.float32, kv_dtype)
    x_TGH = torch.zeros((2, HEADS, HEAD_SIZE))
    x_TGH[1] = torch.nan
    found = through(form, x_TGH)
    assert not found[0].any()
    assert found[1].isnan().all()


def test_heads_without_room_for_a_scale_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"kv\.dtype=int8: a scale cannot follow heads of 6 .* multiples of 4; set kv\.dtype to 'auto'",
    ):
        KVPool(1, 1, 1, 1, 6, torch.float32, CPU, kv_dtype="int8")


@pytest.mark.parametrize(("kv_dtype", "largest"), [("float16", 65504.0), ("fp8_e4m3", 448.0)])
def test_numbers_that_are_too_large_become_the_largest(kv_dtype: str, largest: float) -> None:
    x_TGH = torch.full((1, HEADS, HEAD_SIZE), 1e5)
    x_TGH[:, 1] *= -1
    found = through(PageFormat(torch.float32, kv_dtype), x_TGH)
    assert found[0, :, 0].tolist() == [largest, -largest, largest]


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("kv_dtype", ["", *STORED])
def test_a_pool_reads_what_was_stored_and_counts_its_bytes(kv_dtype: str, layout: Layout) -> None:
    pool = KVPool(3, 5, 4, HEADS, HEAD_SIZE, torch.float32, CPU, layout, kv_dtype)
    page_bytes = KVPool.page_bytes(3, 4, HEADS, HEAD_SIZE, torch.float32, kv_dtype)
    assert page_bytes == pool.by_page[0].nbytes
    assert pool.by_page.nbytes == pool.data.nbytes == 6 * page_bytes
    per_number = {"": 4, "int8": 1 + 4 / HEAD_SIZE}.get(kv_dtype) or STORED[kv_dtype].itemsize
    assert page_bytes == math.ceil(3 * 2 * 4 * HEADS * HEAD_SIZE * per_number)
    slots_T = torch.tensor([0, 3, 2]) + pool.page_stride * torch.tensor([4, 0, 1])
    k_TGH, v_TGH = drawn(3, torch.float32), drawn(3, torch.float32, scale=2.0)
    pool.store(1, k_TGH, v_TGH, slots_T)
    for found, given in zip(pool.read(1, slots_T), (k_TGH, v_TGH), strict=True):
        assert torch.equal(found, through(pool.format, given))
    assert int((pool.by_page.view(torch.uint8) != 0).flatten(3).any(-1).sum()) == 6, "other tokens were written"


@pytest.mark.parametrize("kv_dtype", ["", "int8"])
def test_a_latent_is_read_whole_as_a_key_and_its_first_numbers_as_a_value(kv_dtype: str) -> None:
    pool = KVPool(1, 2, 4, 1, HEAD_SIZE, torch.float32, CPU, kv_dtype=kv_dtype, latent_size=HEAD_SIZE - 4)
    latents_T1H, slots_T = drawn(2, torch.float32)[:, :1], torch.tensor([5, 0])
    pool.store_latents(0, latents_T1H, slots_T)
    keys_T1H, values_T1C = pool.read(0, slots_T)
    assert torch.equal(keys_T1H, through(pool.format, latents_T1H))
    assert torch.equal(values_T1C, keys_T1H[..., : HEAD_SIZE - 4])


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
def test_a_compiler_traces_the_store_as_one_graph(kv_dtype: str) -> None:
    eager, compiled = (KVPool(1, 2, 4, HEADS, HEAD_SIZE, torch.float32, CPU, kv_dtype=kv_dtype) for _ in range(2))
    arguments = (0, drawn(3, torch.float32), drawn(3, torch.float32, scale=2.0), torch.tensor([7, 0, 2]))
    eager.store(*arguments)
    torch.compile(lambda *inputs: compiled.store(*inputs), backend="eager", fullgraph=True)(*arguments)
    assert torch.equal(eager.by_page, compiled.by_page)


@pytest.mark.parametrize(
    ("wanted", "dtype", "kept"),
    [
        ("auto", "float32", ""),
        ("auto", "", ""),
        ("float32", "float32", ""),
        ("bfloat16", "float32", "bfloat16"),
        ("bfloat16", "", ""),
        ("int8", "", "int8"),
        ("fp8_e4m3", "bfloat16", "fp8_e4m3"),
    ],
)
def test_the_setting_says_what_pages_keep(wanted: str, dtype: str, kept: str) -> None:
    assert KVSection(dtype=wanted).kept_as(dtype) == kept
