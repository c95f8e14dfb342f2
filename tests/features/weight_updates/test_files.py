"""Checkpoints that are made of some tensors: links alone, tensors in memory, sparse deltas for known weights alone."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoints.file_digest import file_digests
from engine.checkpoints.shards import read_shards
from engine.features.weight_updates.deltas import difference
from engine.features.weight_updates.files import INDEX_FILE, linked, overlay
from engine.features.weight_updates.memory import HeldMemory, is_sealed, new_memory, parts_of, place, write_tensors
from engine.types.errors import WeightsError

MOST = 1 << 20
A, B = torch.arange(6, dtype=torch.bfloat16).view(2, 3), torch.zeros(4)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    save_file({"a": A, "b": B}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "other.bin").write_bytes(bytes(9))
    return folder


@pytest.fixture
def memory() -> HeldMemory:
    return HeldMemory()


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: load_file(one.file)[one.name] for name, one in read_shards(directory).items()}


def test_a_checkpoint_of_some_tensors_is_made_of_links(base: Path, tmp_path: Path, memory: HeldMemory) -> None:
    save_file({"a": torch.ones(2, 3)}, tmp_path / "one.safetensors")
    overlay([tmp_path / "one.safetensors"], base, tmp_path / "first", "", memory)
    save_file({"b": torch.ones(4)}, tmp_path / "two.safetensors")
    overlay([tmp_path / "two.safetensors"], tmp_path / "first", tmp_path / "second", "", memory)
    made = {path.name: path for path in (tmp_path / "second").iterdir()}
    assert [name for name, path in made.items() if not path.is_symlink()] == [INDEX_FILE]
    assert all(not path.readlink().is_relative_to(tmp_path / "first") for path in made.values() if path.is_symlink())
    assert made["other.bin"].resolve() == base / "other.bin"


def test_the_last_of_several_files_counts(base: Path, tmp_path: Path, memory: HeldMemory) -> None:
    for number in range(2):
        save_file({"a": torch.full((2, 3), float(number))}, tmp_path / f"{number}.safetensors")
    overlay([tmp_path / f"{number}.safetensors" for number in range(2)], base, tmp_path / "made", "", memory)
    assert tensors_of(tmp_path / "made")["a"].eq(1).all()


def test_a_scale_stays_with_weights_in_float8_alone(tmp_path: Path, memory: HeldMemory) -> None:
    base, scale = tmp_path / "base", torch.full((1, 1), 0.5)
    base.mkdir()
    eighths = torch.ones(2, 3).to(torch.float8_e4m3fn)
    save_file({"a.weight": eighths, "a.weight_scale_inv": scale, "b": B}, base / "model.safetensors")
    stages = {
        "floats": ({"a.weight": A}, {"a.weight", "b"}),
        "float8 again": ({"a.weight": eighths, "a.weight_scale_inv": scale}, {"a.weight", "a.weight_scale_inv", "b"}),
        "other floats": ({"a.weight": A + 1}, {"a.weight", "b"}),
    }
    for number, (sent, names) in enumerate(stages.values()):
        place_of_sent, made = memory.write(parts_of(sent)), tmp_path / str(number)
        overlay([place_of_sent], base, made, "", memory)
        found = tensors_of(made)
        assert found.keys() == names
        assert all(torch.equal(found[name].float(), one.float()) for name, one in sent.items())
        base = made
    with pytest.raises(WeightsError, match="'c_scale' is not among"):
        overlay([memory.write(parts_of({"c_scale": scale}))], base, tmp_path / "refused", "", memory)


def test_memory_stays_while_it_is_in_use_and_no_longer(base: Path, tmp_path: Path, memory: HeldMemory) -> None:
    given = write_tensors(parts_of({"a": A + 1}), {})
    held = memory.hold(place(given), MOST)
    assert held.stat().st_ino == os.fstat(given).st_ino, "sealed memory was copied"
    os.close(given)
    overlay([held], base, tmp_path / "first", "", memory)
    other = memory.write(parts_of({"b": B + 1}))
    overlay([other], tmp_path / "first", tmp_path / "second", "", memory)
    memory.keep(linked(tmp_path / "second"))
    assert torch.equal(tensors_of(tmp_path / "second")["a"], A + 1)
    memory.keep(set())
    assert not held.exists()
    assert not other.exists()


def test_memory_that_may_change_is_copied(memory: HeldMemory) -> None:
    given, sealed = new_memory(), write_tensors(parts_of({"a": A}), {})
    content = os.pread(sealed, 1 << 10, 0)
    os.write(given, content)
    held = memory.hold(place(given), MOST)
    os.pwrite(given, bytes(len(content)), 0)
    assert held.read_bytes() == content
    assert is_sealed(os.open(held, os.O_RDONLY))
    with pytest.raises(WeightsError, match="takes 9 at most"):
        memory.hold(place(given), 9)
    with pytest.raises(WeightsError, match="neither memory nor a file"):
        memory.take(os.pipe()[0], MOST)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs shared memory with names")
def test_the_digest_of_a_file_in_shared_memory_is_that_of_its_content() -> None:
    path = Path("/dev/shm") / f"callboard-test-{os.getpid()}"
    path.write_bytes(bytes(4096))
    try:
        mapped = np.memmap(path, np.uint8, "r+")
        mapped[0] = 1
        first = file_digests([path])
        mapped[0] = 2  # the page is writable already, so the file's times stay as they are
        assert file_digests([path]) != first
    finally:
        path.unlink()


def test_a_sparse_delta_gives_the_bits_of_the_new_weights(base: Path, tmp_path: Path, memory: HeldMemory) -> None:
    new = {"a": A.clone(), "b": torch.arange(4.0)}
    new["a"][1, 2] = -0.0
    parts = difference(parts_of({"a": A, "b": B}), parts_of(new))
    assert sorted(parts) == ["a.indices", "a.values", "b"]
    given = write_tensors(parts, {"base": "digest"})
    overlay([place(given)], base, tmp_path / "made", "digest", memory)
    made = tensors_of(tmp_path / "made")
    assert all(torch.equal(made[name].view(torch.uint8), new[name].view(torch.uint8)) for name in new)
    assert difference(parts_of(new), parts_of(new)) == {}


def test_a_delta_may_follow_another_one_in_the_same_update(base: Path, tmp_path: Path, memory: HeldMemory) -> None:
    places = []
    for index, value in ((0, 7.0), (5, 9.0)):
        parts = parts_of({
            "a.indices": np.array([index], np.int64), "a.values": torch.tensor([value], dtype=torch.bfloat16)
        })  # fmt: skip
        places.append(place(write_tensors(parts, {"base": "digest"})))
    overlay(places, base, tmp_path / "made", "digest", memory)
    assert tensors_of(tmp_path / "made")["a"].flatten().tolist() == [7, 1, 2, 3, 4, 9]


def test_the_header_of_a_file_is_read_once_for_all_of_its_tensors(
    tmp_path: Path, memory: HeldMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, read, plain = [], list[object](), json.loads
    monkeypatch.setattr(json, "loads", lambda *given, **more: read.append(None) or plain(*given, **more))
    for num_tensors in (2, 20):
        folder = tmp_path / str(num_tensors)
        folder.mkdir()
        names = [str(number) for number in range(num_tensors)]
        save_file({name: torch.zeros(4) for name in names}, folder / "model.safetensors")
        parts = {key: one for name in names for key, one in delta([1], torch.float32, name).items()}
        given = place(write_tensors(parts_of(parts), {"base": "x"}))
        read.clear()
        overlay([given, given], folder, folder / "made", "x", memory)
        counts.append(len(read))
    assert counts[0] == counts[1]


def delta(indices: list[int], dtype: torch.dtype = torch.bfloat16, name: str = "a") -> dict[str, torch.Tensor]:
    return {
        f"{name}.indices": torch.tensor(indices, dtype=torch.int32),
        f"{name}.values": torch.zeros(len(indices), dtype=dtype),
    }


@pytest.mark.parametrize(
    ("tensors", "metadata", "said"),
    [
        (delta([1]), {}, "without 'base'"),
        (delta([1]), {"base": "other"}, "for weights of digest 'other'"),
        ({"a": A}, {"base": "other"}, "for weights of digest 'other'"),
        (delta([1, 1]), {"base": "digest"}, "does not rise"),
        (delta([-1, 1]), {"base": "digest"}, "does not rise"),
        (delta([1, 6]), {"base": "digest"}, "below 6"),
        (delta([3, 5 - (1 << 31), -1, 0, 5]), {"base": "digest"}, "does not rise"),  # by differences of 32 bits it does
        (delta([1], torch.float32), {"base": "digest"}, "is F32, but the tensor is BF16"),
        ({"a.indices": torch.zeros(1, dtype=torch.int32)}, {"base": "digest"}, "has no 'a.values'"),
        ({**delta([1]), "a.indices": torch.zeros(1)}, {"base": "digest"}, "is F32 of shape"),
        ({**delta([1]), "a.values": torch.zeros(2, dtype=torch.bfloat16)}, {"base": "digest"}, "one index for each"),
        ({**delta([1]), "a": A}, {"base": "digest"}, "as a whole and as elements"),
        (delta([1], name="c"), {"base": "digest"}, "not among the 2"),
        ({"c": A}, {}, "'c' is not among the 2"),
        ({"a": A.T.contiguous()}, {}, "has shape"),
    ],
    ids=str,
)
def test_what_is_not_for_these_weights_is_refused(
    tensors: dict[str, torch.Tensor], metadata: dict[str, str], said: str, base: Path, tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "new.safetensors", metadata)
    with pytest.raises(WeightsError, match=said):
        overlay([tmp_path / "new.safetensors"], base, tmp_path / "made", "digest", HeldMemory())
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("given", [{"a": [1.0]}, {"a": np.zeros(2, np.complex64)}])
def test_things_that_are_no_tensors_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(WeightsError, match="'a' is"):
        parts_of(given)


@pytest.mark.parametrize("make", [lambda one: one, lambda one: one.t(), lambda one: one[:, 1:], lambda one: one[:0]])
def test_tensors_are_written_in_the_layout_of_safetensors(
    make: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    tensor = make(torch.randn(3, 4).to(torch.float16).requires_grad_())
    memory = write_tensors(parts_of({"x": tensor, "y": np.arange(5)}), {"base": "b"})
    (tmp_path / "x.safetensors").write_bytes(place(memory).read_bytes())
    found = load_file(tmp_path / "x.safetensors")
    assert torch.equal(found["x"], tensor.detach())
    assert found["y"].tolist() == [0, 1, 2, 3, 4]
    assert json.loads(place(memory).read_bytes()[8:].partition(b"}}")[0] + b"}}")["__metadata__"] == {"base": "b"}
