"""Tuning of the triton backend: its host side, with a clock of the test's own and kernels that only note launches."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

pytest.importorskip("triton", reason="triton is not published for this system")

from engine.layers.attention import AttentionSpec
from engine.layers.kv_pool import KVPool
from engine.plugins.attention.triton import trials, tuning
from engine.plugins.attention.triton.backend import TritonAttention
from engine.plugins.attention.triton.tiles import (
    INTERPRETED,
    DecodeTiles,
    GpuProcessors,
    PrefillTiles,
    decode_candidates,
    prefill_candidates,
)
from engine.plugins.attention.triton.trials import tune, use_known
from engine.plugins.attention.triton.tuning import (
    TileTable,
    bucket,
    kept_table,
    nearest,
    size_key,
)
from tests.attention.recorded_launches import H200, Recorder

CPU = torch.device("cpu")
DECODE, PREFILL = DecodeTiles(64, 4, 3, 3), PrefillTiles(128, 64, 8, 3)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recorder:
    """Its launches, and a cache directory of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recorder = Recorder()
    recorder.replace_kernels(monkeypatch)
    return recorder


def backend_of(processors: GpuProcessors = H200, window: int = 0, num_heads: int = 4) -> TritonAttention:
    spec = AttentionSpec(2, num_heads, 2, 128, 128**-0.5, window)
    return TritonAttention(spec, KVPool(2, 64, 16, 2, 128, torch.bfloat16, CPU), processors)


class Clock:
    """What a piece of work 'takes': wide tiles are slow on short contexts and fast on long ones."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.num_measured = 0

    def __call__(self, work: Callable[[], None]) -> float:
        self.num_measured += 1
        work()
        first, *_ = self.recorder.taken()
        wide = first.constants["BLOCK_N"]
        context = first.tensors[4].shape[1] * 16
        return 1.0 / wide if context > 100 else float(wide)


def test_the_fastest_is_taken_for_each_size_and_measured_once(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    backend, clock = backend_of(), Clock(recorder)
    table = tune(backend, (1, 4), (64, 256), clock)
    assert set(table.decode) == {size_key(backend.shape, batch, context) for batch in (1, 4) for context in (64, 256)}
    assert [table.decode[size_key(backend.shape, 1, context)].block_keys for context in (64, 256)] == [32, 128]
    assert [table.prefill[size_key(backend.shape, 1, context)].block_keys for context in (64, 256)] == [32, 128]
    candidates = len(decode_candidates(128, 2, H200)), len(prefill_candidates(128, 2, H200))
    assert clock.num_measured == 4 * candidates[0] + 2 * candidates[1]
    assert backend.tuned is table
    # The next start, with the option and without it.
    again = backend_of()
    assert tune(again, (1, 4), (64, 256), Clock(recorder)) == table
    known = backend_of()
    recorder.taken()
    use_known(known)
    assert known.tuned == table
    assert {launch.constants["BLOCK_N"] for launch in recorder.taken()} == {32, 128}, (
        "compiled before the first request"
    )
    assert "tiles of 0 sizes measured, 6 known before" in caplog.text
    assert "tiles of 6 sizes known from before" in caplog.text


def test_another_shape_has_tiles_of_its_own(recorder: Recorder) -> None:
    tune(backend_of(), (1,), (64,), Clock(recorder))
    for other in (backend_of(window=1), backend_of(window=16), backend_of(num_heads=16)):
        clock = Clock(recorder)
        table = tune(other, (1,), (64,), clock)
        assert clock.num_measured > 0
    assert len(table.decode) == len(table.prefill) == 4
    recorder.taken()
    use_known(backend_of(window=1))
    assert {launch.constants["WINDOW"] for launch in recorder.taken()} == {1}


def test_sizes_beyond_the_pool_are_left_out(recorder: Recorder) -> None:
    backend = backend_of()
    table = tune(backend, (1,), (64, 1024, 4096), Clock(recorder))
    assert set(table.prefill) == {size_key(backend.shape, 1, context) for context in (64, 1024)}


def test_candidates_that_cannot_run_are_out(recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    recorder.fails = {"BLOCK_N": 32}
    backend = backend_of()
    table = tune(backend, (1,), (64,), Clock(recorder))
    assert [one.block_keys for one in (*table.decode.values(), *table.prefill.values())] == [64, 64]
    assert "out of resource: shared memory" in caplog.text
    recorder.fails = {"PAGE_SIZE": 16}
    assert tune(backend_of(num_heads=8), (1,), (64,), Clock(recorder)).decode.keys() == table.decode.keys()


def test_tiles_from_the_file_that_cannot_run_are_dropped(recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    tune(backend_of(), (1,), (64, 256), Clock(recorder))
    recorder.fails = {"BLOCK_N": 128}
    backend = backend_of()
    use_known(backend)
    assert [one.block_keys for one in backend.tuned.decode.values()] == [32]
    assert caplog.text.count("cannot be used: RuntimeError: out of resource") == 2


def test_the_interpreter_is_not_tuned(recorder: Recorder) -> None:
    backend = backend_of(GpuProcessors(INTERPRETED, 4, 227 << 10))
    use_known(backend)
    assert tune(backend, (1,), (64,)) == TileTable()
    assert recorder.launches == []


def test_the_table_is_of_one_gpu_one_triton_and_these_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = kept_table("NVIDIA H200").path
    monkeypatch.setattr(tuning.triton, "__version__", "9.9")
    paths = {first, kept_table("NVIDIA H200").path, kept_table("NVIDIA A100-SXM4").path}
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "decode.py").write_text("other kernels")
    monkeypatch.setattr(tuning, "__file__", str(tmp_path / "source" / "tuning.py"))
    paths.add(kept_table("NVIDIA H200").path)
    assert len(paths) == 4
    assert any(path is not None and "NVIDIA_A100_SXM4_9_9-" in path.name for path in paths)


def test_a_table_survives_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    table = TileTable({"a": DECODE}, {"b": PREFILL})
    kept_table("NVIDIA H200").keep(table)
    assert kept_table("NVIDIA H200").load() == table


@pytest.mark.parametrize("tiles", [{"block_keys": 64}, {"block_keys": 64, "num_warps": 4, "programs": 9}])
def test_a_table_of_other_fields_is_not_used(
    tiles: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = kept_table("NVIDIA H200")
    assert kept.path is not None
    kept.path.parent.mkdir(parents=True)
    kept.path.write_bytes(msgspec.json.encode({"about": "", "results": {"decode": {"a": tiles}}}))
    assert kept.load() is None


def test_sizes_go_in_powers_of_four() -> None:
    assert [bucket(count) for count in (0, 1, 2, 4, 5, 16, 17, 1024, 1025)] == [1, 1, 4, 4, 16, 16, 64, 1024, 4096]
    tiles = {size_key("s", 16, 1024): "a", size_key("s", 1, 4096): "b", size_key("s", 64, 4096): "c"}
    found = {
        (rows, context): nearest(tiles, "s", rows, context) for rows in (1, 5, 100) for context in (900, 3000, 99999)
    }
    assert found == {
        (1, 900): None,
        (1, 3000): "b",
        (1, 99999): "b",
        (5, 900): "a",
        (5, 3000): "b",
        (5, 99999): "b",
        (100, 900): "a",
        (100, 3000): "c",
        (100, 99999): "c",
    }
    assert nearest(tiles, "t", 100, 99999) is None


def test_without_a_clock_of_ones_own_a_captured_graph_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def bench(work: Callable[[], None], rep: int, return_mode: str) -> float:
        work()
        return {"median": rep}[return_mode]

    monkeypatch.setattr(trials.triton.testing, "do_bench_cudagraph", bench)
    done: list[int] = []
    assert trials._milliseconds(lambda: done.append(1)) > 0
    assert done == [1]
