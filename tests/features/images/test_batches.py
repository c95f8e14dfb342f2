"""Pictures of several requests in one batch of the encoder: bounded, in the order of messages, rows of each its own."""

import json
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.features.images.messages import EncodePicture, PictureEncoded, PictureFile
from engine.features.images.rank import MOST_IN_BATCH, ImagesRank
from engine.plugins.encoder import towers
from engine.plugins.encoder.encoder import ToEncode, encode_each
from engine.plugins.encoder.towers import TILES
from engine.plugins.encoder.transformers import TransformersEncoder
from engine.types.errors import RequestError
from tests.features.images import made
from tests.features.images.served import ONE, THREE, chat, checkpoint, encoded, engine, expected, message
from tests.workers.executors import within

ALL = [*THREE, (77, 58), (50, 31)]


class Watched:
    """A tower that waits for its first picture's permission, and notes what it computes at once."""

    nbytes = 1

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.may_begin = threading.Event()

    def encode(self, data: bytes, way: str) -> Tensor:
        self.may_begin.wait(5.0)
        self.batches.append([data])
        if data == b"broken":
            raise RequestError("it is broken")
        return torch.full((1, 8, 2), float(len(data)))

    def encode_batch(self, pictures: Sequence[ToEncode]) -> list[Tensor]:
        self.batches.append([one.data for one in pictures])
        if any(one.data == b"broken" for one in pictures):
            raise RuntimeError
        return [torch.full((1, one.num_rows, 2), float(len(one.data))) for one in pictures]


class Asked:
    """A rank with a watched tower.  answers: by number."""

    def __init__(self, most_rows: int) -> None:
        self.tower, self.answers = Watched(), dict[int, str]()
        self.rows: Any = SimpleNamespace(encoded={})
        self.rank = ImagesRank(0, self.tower, self.rows, 0, most_rows)

    def send(self, number: int, data: bytes | None, key: str = "", forget: tuple[str, ...] = ()) -> None:
        picture = None if data is None else PictureFile(key or str(number), data, 8)
        answer: Callable[[Any], None] = partial(self._answer, number)
        self.rank.receive(EncodePicture(picture, forget).message(number), answer)

    def _answer(self, number: int, message: Any) -> None:
        self.answers[number] = PictureEncoded.of(message).reason

    def batches(self, count: int) -> list[list[bytes]]:
        """Let the tower begin.  Return what it has computed at once when so many answers are there."""
        self.tower.may_begin.set()
        within(5.0, lambda: len(self.answers) == count)
        self.rank.close()
        return self.tower.batches


def test_pictures_that_wait_are_encoded_at_once_within_bounds() -> None:
    asked = Asked(40)
    for number in range(9):
        asked.send(number, b"x" * (number + 1))
    sizes = [len(one) for one in asked.batches(9)]
    assert sum(sizes) == 9
    assert max(sizes) == 5  # of 8 rows each
    assert all(bool((rows == int(key) + 1).all()) for key, rows in asked.rows.encoded.items())
    many = Asked(1000)
    for number in range(30):
        many.send(number, b"x")
    assert max(map(len, many.batches(30))) <= MOST_IN_BATCH
    alone = Asked(0)
    for number in range(5):
        alone.send(number, b"x")
    assert alone.batches(5) == [[b"x"]] * 5


def test_a_key_that_is_forgotten_or_comes_again_ends_a_batch() -> None:
    asked = Asked(1000)
    asked.send(0, b"first")
    asked.send(1, b"a", "one")
    asked.send(2, b"b", "two")
    asked.send(3, None, forget=("one",))
    asked.send(4, b"c", "three", forget=("two",))
    assert [b"a", b"b"] in [batch for batch in asked.batches(4) if batch != [b"first"]] or asked.tower.batches[0] == [
        b"first", b"a", b"b"
    ]  # fmt: skip
    assert set(asked.rows.encoded) == {"0", "three"}


def test_a_broken_picture_of_a_batch_is_an_error_of_its_own() -> None:
    asked = Asked(1000)
    for number, data in enumerate((b"first", b"good", b"broken", b"good")):
        asked.send(number, data)
    asked.batches(4)
    assert asked.answers == {0: "", 1: "", 2: "it is broken", 3: ""}
    assert set(asked.rows.encoded) == {"0", "1", "3"}


@pytest.mark.slow
@pytest.mark.parametrize("name", made.KINDS)
def test_rows_of_a_batch_are_those_of_each_picture(name: str, folder: Path) -> None:
    directory = checkpoint(name, folder)
    encoder = TransformersEncoder(directory, json.loads((directory / "config.json").read_text()))
    tower = encoder.tower("cpu", "float32")
    layouts = [encoder.layout(*size, "auto") for size in ALL]
    given = [ToEncode(made.picture(*size), one.way, one.num_rows) for size, one in zip(ALL, layouts, strict=True)]
    together = tower.encode_batch(given)  # type: ignore[attr-defined]
    for one, rows_LND in zip(given, together, strict=True):
        alone_LND = tower.encode(one.data, one.way)
        assert rows_LND.shape == alone_LND.shape
        assert torch.allclose(rows_LND, alone_LND, atol=1e-4, rtol=1e-4)
    found = encode_each(tower, [*given, ToEncode(b"no picture", "", 4)])
    assert [isinstance(one, Tensor) for one in found] == [True] * len(given) + [False]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smolvlm", "idefics3", "internvl"])
def test_small_tiles_are_encoded_at_once_and_large_ones_alone(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint(name, folder)
    config = json.loads((directory / "config.json").read_text())
    encoder, dimension = TransformersEncoder(directory, config), TILES[config["architectures"][0]]
    tower: Any = encoder.tower("cpu", "float32")
    counts: list[int] = []
    compute = tower.__dict__["_model"].get_image_features

    def features(**inputs: Any) -> Any:
        counts.append(inputs["pixel_values"].shape[dimension])
        return compute(**inputs)

    monkeypatch.setattr(tower.__dict__["_model"], "get_image_features", features)
    data, way = made.picture(90, 60), encoder.layout(90, 60, "auto").way
    together_LND = tower.encode(data, way)
    (num_tiles,) = counts
    assert num_tiles > 2
    monkeypatch.setattr(towers, "MOST_TILE_PIXELS", 1)
    alone_LND = tower.encode(data, way)
    assert counts[1:] == [1] * num_tiles
    assert torch.allclose(together_LND, alone_LND, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava", "smolvlm", "qwen2_5_vl"])
def test_requests_whose_pictures_are_encoded_at_once_have_the_tokens_of_transformers(name: str, folder: Path) -> None:
    with engine(checkpoint(name, folder)) as llm:
        found = chat(llm, [message(THREE), message(ONE), message([(77, 58)]), message(THREE)], 24)
        assert encoded(llm) == 4
    assert [found[index].token_ids for index in (0, 1, 3)] == [
        expected(name, folder, sizes, 24) for sizes in (THREE, ONE, THREE)
    ]
