"""The triton backend's host side: what it refuses, what it launches, and that no launch depends on a length.

What the kernels compute is tested in ``interpreted``, how they compile in ``test_triton_compiled.py``.
"""

import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not published for this system")

from engine.graphs.decode_attention import can_capture
from engine.layers.attention import AttentionBatch, AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention import triton as triton_plugin
from engine.plugins.attention.triton import callboard_attention_backend
from engine.plugins.attention.triton.backend import TritonAttention
from engine.plugins.attention.triton.tiles import DecodeTiles, PrefillTiles
from engine.plugins.attention.triton.tuning import size_key
from engine.plugins.declaration import convert_declaration
from engine.plugins.hookspecs import AttentionContext
from engine.plugins.manager import BUILTIN, Plugins, available_plugins
from engine.plugins.selection import choose_attention
from engine.types.errors import PluginError
from tests.attention.batches import META, batch_of
from tests.attention.recorded_launches import H200, Launch, Recorder


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    recorder.replace_kernels(monkeypatch)
    return recorder


def spec_of(num_heads: int = 16, num_kv_heads: int = 8, head_size: int = 128, **window: int) -> AttentionSpec:
    return AttentionSpec(4, num_heads, num_kv_heads, head_size, head_size**-0.5, **window)


def backend_of(
    spec: AttentionSpec, device: torch.device = META, page_size: int = 16, invariant: bool = False
) -> TritonAttention:
    pool = KVPool(spec.num_layers, 32, page_size, spec.num_kv_heads, spec.head_size, torch.bfloat16, device)
    return TritonAttention(spec, pool, H200, invariant)


def launches(recorder: Recorder, backend: TritonAttention, batch: AttentionBatch, layer: int = 0) -> list[Launch]:
    spec, num_tokens = backend.spec, int(batch.host_query_lengths.sum())
    backend.plan_step(batch)
    device = batch.page_table_BP.device
    q_TNH = torch.zeros((num_tokens, spec.num_heads, spec.head_size), dtype=torch.bfloat16, device=device)
    out_TNH = backend.attend(layer, q_TNH)
    assert (out_TNH.shape, out_TNH.dtype) == (q_TNH.shape, q_TNH.dtype)
    return recorder.taken()


def shapes(made: list[Launch]) -> list[object]:
    """All that a captured launch keeps for ever, but addresses."""
    return [(one.kernel, one.grid, one.numbers, one.constants) for one in made]


def test_launches_follow_from_shapes_alone(recorder: Recorder) -> None:
    """So a captured decode step can be replayed for other lengths; the tensors here could not even be asked."""
    backend = backend_of(spec_of())
    short = launches(recorder, backend, batch_of(24, length=1))
    long = launches(recorder, backend, batch_of(24, length=120))
    assert [one.kernel for one in short] == ["decode_attention"], "the last program of a row merges its parts"
    assert shapes(short) == shapes(long)
    assert short[0].grid == (8, 132 * 3 // 8)


@pytest.mark.parametrize(
    ("heads", "window", "launched"), [((32, 8), 0, 1), ((64, 8), 0, 2), ((64, 8), 1024, 1), ((8, 1), 0, 2)]
)
def test_parts_of_many_bytes_are_merged_in_a_launch_of_their_own(
    recorder: Recorder, heads: tuple[int, int], window: int, launched: int
) -> None:
    made = launches(recorder, backend_of(spec_of(*heads, window=window)), batch_of(24))
    assert [one.kernel for one in made] == ["decode_attention", "merge_parts"][:launched]
    assert made[0].constants["MERGES"] == (launched == 1)
    assert all(one.grid == (heads[0], 24) for one in made[1:])


def test_rows_that_may_share_pages_are_compared_once_a_step(recorder: Recorder) -> None:
    backend = backend_of(spec_of(window=64, first_window_layer=3))
    backend.plan_step(batch_of(48, length=120))
    for layer in range(4):
        backend.attend(layer, torch.empty(48, 16, 128, dtype=torch.bfloat16, device="meta"))
    kernels = [one.kernel for one in recorder.taken()]
    full = ["shared_attention", "decode_attention"]
    assert kernels == ["compare_rows", "choose_rows", *full * 3, *full[1:]]


def test_rows_that_share_no_page_are_not_compared(recorder: Recorder) -> None:
    backend = backend_of(spec_of())
    apart = replace(batch_of(48, length=120), shares=False)
    assert [one.kernel for one in launches(recorder, backend, apart)] == ["decode_attention"]


def test_a_mixed_step_attends_to_rows_and_to_prompts(recorder: Recorder) -> None:
    batch = batch_of(3, 2, length=100)
    decode, prefill = launches(recorder, backend_of(spec_of()), batch)
    assert (decode.numbers[0], prefill.numbers[0]) == (3, 2)
    assert prefill.grid == (8, 200 * 2 // 128 + 2)
    assert [tensor.shape for tensor in prefill.tensors[4:]] == [(2, 8), (2,), (3,)]
    assert [one.kernel for one in launches(recorder, backend_of(spec_of()), batch_of(0, 1))] == ["prefill_attention"]


def test_with_invariant_numerics_all_rows_are_prompts_in_the_default_tiles(recorder: Recorder) -> None:
    backend = backend_of(spec_of(), invariant=True)
    (mixed,) = launches(recorder, backend, batch_of(3, 2, length=100))
    assert (mixed.kernel, mixed.grid, mixed.numbers[0]) == ("prefill_attention", (8, 203 * 2 // 128 + 5), 5)
    (decodes,) = launches(recorder, backend, batch_of(48))
    assert decodes.grid == (8, 48 * 2 // 128 + 48)
    assert decodes.constants == mixed.constants
    assert mixed.constants["ONE_LOOP"]


@pytest.mark.parametrize("heads", [(8, 8), (32, 8), (40, 8), (8, 1), (64, 1)])
def test_every_query_has_a_program(recorder: Recorder, heads: tuple[int, int]) -> None:
    spec = spec_of(*heads)
    group = heads[0] // heads[1]
    for count, length in ((1, 1), (1, 1000), (7, 33)):
        (prefill,) = launches(recorder, backend_of(spec), batch_of(0, count, length=length))
        queries = prefill.constants["BLOCK_M"] // group
        assert queries >= 1
        assert prefill.grid[1] >= count * -(-length // queries)


def test_large_batches_merge_all_heads_of_a_group_in_one_program(recorder: Recorder) -> None:
    *_, merge = launches(recorder, backend_of(spec_of(64)), batch_of(512))
    assert (merge.grid, merge.numbers[2]) == ((8, 512), 8)


def test_the_window_begins_at_its_layer(recorder: Recorder) -> None:
    backend = backend_of(spec_of(window=64, first_window_layer=2))
    windows = [launches(recorder, backend, batch_of(2, 1), layer)[0].constants["WINDOW"] for layer in range(4)]
    assert windows == [0, 0, 64, 64]


def test_a_slice_of_a_product_is_read_in_place_and_other_strides_are_not(recorder: Recorder) -> None:
    backend = backend_of(spec_of())
    backend.plan_step(batch_of(5))
    product = torch.zeros((5, 32, 128), dtype=torch.bfloat16, device=META)
    for q_TNH, stride in ((product[:, :16], 32 * 128), (product[:, ::2], 16 * 128)):
        backend.attend(0, q_TNH)
        (decode,) = recorder.taken()
        assert decode.numbers[2] == stride


def test_tuned_tiles_serve_their_size_and_larger_ones(recorder: Recorder) -> None:
    backend = backend_of(spec_of())
    default = launches(recorder, backend, batch_of(16, 1))
    small, large = DecodeTiles(16, 2, 2, 1), DecodeTiles(32, 8, 4, 2)
    backend.tuned.decode |= {size_key(backend.shape, 16, 64): small, size_key(backend.shape, 16, 256): large}
    backend.tuned.prefill[size_key(backend.shape, 1, 64)] = PrefillTiles(64, 32, 4, 2)

    def blocks(num_decodes: int, width: int) -> tuple[int, int]:
        *_, decode, prefill = launches(recorder, backend, batch_of(num_decodes, 1, width))
        return decode.constants["BLOCK_N"], prefill.constants["BLOCK_N"]

    assert blocks(16, 4) == (16, 32)
    assert blocks(16, 16) == blocks(300, 100) == (32, 32)
    assert blocks(1, 1) == (default[0].constants["BLOCK_N"], default[1].constants["BLOCK_N"]) == (64, 64)


def test_a_decode_graph_can_have_it_whole(recorder: Recorder) -> None:
    """Sizes are captured one after the other, over slices of the same tensors; each keeps what it was launched with."""
    backend, inputs = backend_of(spec_of(), torch.device("cpu")), batch_of(8, width=40, device=torch.device("cpu"))
    assert can_capture(backend)
    assert backend.capturable
    for size in (8, 3, 1):
        rows = AttentionBatch(
            num_decodes=size,
            page_table_BP=inputs.page_table_BP[:size],
            lengths_B=inputs.lengths_B[:size],
            query_starts_B1=inputs.query_starts_B1[: size + 1],
            host_lengths=inputs.host_lengths[:size],
            host_query_lengths=inputs.host_query_lengths[:size],
        )
        (decode,) = launches(recorder, backend, rows)
        assert decode.numbers[0] == size
        addresses = [tensor.data_ptr() for tensor in decode.tensors[4:6]]
        assert addresses == [inputs.page_table_BP.data_ptr(), inputs.lengths_B.data_ptr()]
        assert decode.tensors[8].data_ptr() == backend._arrived.data_ptr()


def context(**changes: object) -> AttentionContext:
    shape = {"page_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_size": 64}
    return AttentionContext(**{"device": "cuda", "dtype": "bfloat16", **shape, **changes})


def test_it_refuses_what_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    declaration = convert_declaration("triton", triton_plugin.CALLBOARD_PLUGIN)
    assert "device cpu, it takes cuda" in declaration.misfits(context(device="cpu"))
    with pytest.raises(PluginError, match=r"'attention\.triton'.*`tiles`"):
        callboard_attention_backend(context(options={"tiles": 3}))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(PluginError, match=r"needs compute capability 8\.0, this GPU has 7\.5"):
        callboard_attention_backend(context())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert callable(callboard_attention_backend(context()))
    monkeypatch.setitem(sys.modules, "engine.plugins.attention.triton.trials", None)
    with pytest.raises(PluginError, match="needs triton, which cannot be imported"):
        callboard_attention_backend(context())


def test_latents_that_are_too_wide_are_refused_and_heads_share_out_what_a_program_holds() -> None:
    pool = KVPool(1, 2, 16, 1, 1088, torch.float32, torch.device("cpu"), latent_size=1024)
    factory = callboard_attention_backend(context(device="cpu"))
    with pytest.raises(PluginError, match="latents of 1024 numbers, it takes multiples of 8 up to 512"):
        factory(AttentionSpec(1, 128, 1, 1088, 1.0, latent_size=1024), pool)
    pool = KVPool(1, 2, 16, 1, 576, torch.float32, torch.device("cpu"), latent_size=512)
    for num_heads, group in ((128, 16), (20, 10), (4, 4)):
        backend = TritonAttention(AttentionSpec(1, num_heads, 1, 576, 1.0, latent_size=512), pool, H200)
        assert backend._constants(backend._default_decode, 0)["GROUP"] == group
        assert backend._num_groups == num_heads // group
    pool = KVPool(1, 2, 16, 1, 576, torch.bfloat16, torch.device("cpu"), latent_size=512)
    for num_heads, group, warps in ((128, 32, 8), (20, 20, 8), (16, 16, 4)):
        backend = TritonAttention(AttentionSpec(1, num_heads, 1, 576, 1.0, latent_size=512), pool, H200)
        assert (backend._group, backend._default_decode.num_warps) == (group, warps)


def test_on_a_gpu_auto_takes_it_where_no_library_fits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    plugins = Plugins({"attention": "auto"})
    (choice,) = choose_attention(plugins, context(dtype="float32"))
    assert choice.info.name == "attention.triton"
    (line,) = [line for line in caplog.messages if "attention.triton for prefill and decode" in line]
    assert "auto on cuda / flashinfer: " in line
    assert "/ flash_attn: " in line
    (choice,) = choose_attention(plugins, context(device="cpu"))
    assert choice.info.name == "attention.torch"


def test_it_is_listed_with_what_it_needs() -> None:
    (info,) = [info for info in available_plugins() if info.name == "attention.triton"]
    assert (info.built_in, info.module) == (True, BUILTIN["attention.triton"])
