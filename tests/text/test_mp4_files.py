"""Frames of MP4 files are those that transformers reads."""

import sys
from io import BytesIO

import numpy as np
import pytest

from engine.text.film_files import FilmFile
from engine.text.mp4_files import is_mp4, mp4_frames, mp4_length, open_mp4
from engine.text.turns import read_turn
from engine.types.errors import RequestError
from engine.types.prompt import Film, Picture
from tests.text.films import turned, written

HEAD = b"\0\0\0\x20ftypisom" + bytes(20)


def read(data: bytes) -> Picture:
    (film,) = read_turn({"role": "user", "content": [{"type": "video", "video": data}]}).pictures
    return film


def test_frames_are_those_of_transformers() -> None:
    pytest.importorskip("av")
    from transformers.video_utils import read_video_pyav

    for codec in ("libx264", "mpeg4"):
        data = written(7, 48, 32, codec=codec)
        film = read(data)
        assert (film.film, film.width, film.height) == (Film(7, 5.0), 48, 32)
        wanted, _ = read_video_pyav(BytesIO(data), lambda metadata, **_: [0, 3, 6])
        found = [np.asarray(one) for one in FilmFile.read(film.data).frames([0, 3, 6])]
        assert all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert not np.array_equal(found[0], found[1])


def test_a_file_in_fragments_has_all_of_its_frames() -> None:
    pytest.importorskip("av")
    data = written(6, movflags="frag_keyframe+empty_moov")
    with open_mp4(data) as file:
        assert file.num_frames == 0
    assert read(data).film == Film(6, 5.0)


def test_a_frame_that_comes_again_and_one_that_is_missing() -> None:
    pytest.importorskip("av")
    film = FilmFile(Film(6, 5.0), (written(),))
    assert len([*film.frames([1, 1, 5])]) == 3
    with pytest.raises(RequestError, match="has no frame 6"):
        list(film.frames([5, 6]))


def test_frames_are_turned_as_the_camera_was_held() -> None:
    pytest.importorskip("av")
    assert mp4_length(turned(written()))[2] == (24, 32)
    for lying, upright in zip(mp4_frames(written(), range(6)), mp4_frames(turned(written()), range(6)), strict=True):
        assert np.array_equal(np.rot90(np.array(lying), -1), np.array(upright))


def test_what_is_no_mp4_is_refused() -> None:
    pytest.importorskip("av")
    assert not is_mp4(b"\0\0\0\x20ftypavif" + bytes(20))
    assert is_mp4(HEAD)
    for data in (HEAD, written()[:-900], written(codec="mjpeg")):
        with pytest.raises(RequestError, match="a video cannot be read"):
            read(data)


def test_without_its_package_a_program_learns_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(RequestError, match=r"callboard\[video\]"):
        read(HEAD)
