"""Parts of a GGUF model are found by their names, and refused if they are not all of one model."""

from pathlib import Path

import numpy as np
import pytest

from engine.checkpoints.gguf_parts import model_name, part_paths, read_header
from engine.types.errors import WeightsError

gguf = pytest.importorskip("gguf", reason="pip install 'callboard[gguf]'")


def split(folder: Path, name: str = "tiny", tensors: int = 6, each: int = 2) -> list[Path]:
    """Write a model of vectors in parts of so many, as llama.cpp's converter does."""
    writer = gguf.GGUFWriter(folder / f"{name}.gguf", "llama", split_max_tensors=each)
    for number in range(tensors):
        writer.add_tensor(f"{name}.{number}", np.full(8, number, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob(f"{name}-*.gguf"))


def test_any_part_names_all_of_them_in_order(tmp_path: Path) -> None:
    paths = split(tmp_path)
    assert [one.name for one in paths] == [f"tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for path in paths:
        assert part_paths(path) == paths
        assert model_name(path) == "tiny"


@pytest.mark.parametrize("name", ["tiny.gguf", "a-1-of-3.gguf", "a-00004-of-00003.gguf", "a-00000-of-00003.gguf"])
def test_another_name_is_that_of_a_whole_file(name: str, tmp_path: Path) -> None:
    assert part_paths(tmp_path / name) == [tmp_path / name]
    assert model_name(tmp_path / "v1.5-tiny.Q4_0.gguf") == "v1.5-tiny.Q4_0"


def test_the_tensors_are_those_of_all_parts(tmp_path: Path) -> None:
    paths = split(tmp_path)
    header = read_header(paths)
    assert [(one.name, one.part) for one in header.tensors] == [(f"tiny.{n}", n // 2) for n in range(6)]
    for one in header.tensors:
        stored = paths[one.part].read_bytes()[one.offset : one.offset + one.num_bytes]
        assert np.frombuffer(stored, "<f4").tolist() == [float(one.name[-1])] * 8


def test_missing_parts_are_named(tmp_path: Path) -> None:
    paths = split(tmp_path, tensors=12)
    paths[1].unlink()
    said = (
        r"tiny-00001-of-00006.gguf: 5 of the 6 parts of a model are in its folder, and not tiny-00002-of-00006.gguf; "
    )
    with pytest.raises(WeightsError, match=said):
        part_paths(paths[0])
    for path in paths[2:5]:
        path.unlink()
    with pytest.raises(WeightsError, match=r"2 of the 6 .* tiny-00004-of-00006.gguf and others; put all parts into"):
        part_paths(paths[0])


def test_parts_of_two_models_are_refused(tmp_path: Path) -> None:
    paths, others = split(tmp_path), split(tmp_path, "other", tensors=9, each=3)
    with pytest.raises(WeightsError, match=r"the 3 parts have 7 tensors"):
        read_header([*paths[:2], others[2]])
    with pytest.raises(WeightsError, match=r"tiny-00001-of-00003.gguf: split.no is 0 and split.count is 3, expected 1"):
        read_header([paths[0], paths[0], paths[2]])
    with pytest.raises(
        WeightsError, match=r"split.count is 3, and 1 of the model's files are there; .*NAME-00001-of-00003"
    ):
        read_header(paths[:1])
    twice = tmp_path / "twice"
    twice.mkdir()
    same = split(twice, tensors=4, each=2)
    with pytest.raises(WeightsError, match=r"split.count is 2, and 3 of the model's files are there"):
        read_header([*same, paths[2]])


def test_a_whole_file_needs_no_numbers(tmp_path: Path) -> None:
    assert split(tmp_path, each=0) == []
    assert len(read_header([tmp_path / "tiny.gguf"]).tensors) == 6
