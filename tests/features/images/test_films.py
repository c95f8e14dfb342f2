"""Films give transformers' greedy tokens, and their frames, pixels and texts are those of transformers' processors."""

import io
import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from engine.config import Config
from engine.plugins.encoder import film_pixels
from engine.plugins.encoder.films import (
    WAY,
    FilmFamily,
    GemmaFilms,
    InternFilms,
    OnevisionFilms,
    QwenFilms,
    SmolFilms,
    TimedQwenFilms,
    spelt,
)
from engine.plugins.encoder.layouts import FamilyFiles
from engine.plugins.encoder.transformers import TransformersEncoder
from engine.plugins.parsers import plugin_codec
from engine.text.pictures import FIRST_ID, NAME, PlacedPicture, placed_pictures
from engine.text.turns import read_turn
from engine.types.errors import RequestError
from engine.types.prompt import LEAST_FPS, Film
from tests.features.images import made
from tests.features.images.served import ONE, chat, checkpoint, encoded, engine

RECORDED = Path(__file__).with_name("films.json")
FAMILIES: dict[str, type[FilmFamily]] = {
    "Qwen2VLVideoProcessor": QwenFilms,
    "Qwen3VLVideoProcessor": TimedQwenFilms,
    "LlavaOnevisionVideoProcessor": OnevisionFilms,
    "InternVLVideoProcessor": InternFilms,
    "SmolVLMVideoProcessor": SmolFilms,
}
FAST = ("qwen2_5_vl", "qwen3_vl")
KINDS = (
    *FAST,
    "qwen2_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "llava_onevision",
    "internvl",
    "smolvlm",
    "gemma4",
    "gemma4_small",
)
SHORT = {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 24}


@cache
def frames(count: int, width: int, height: int, seed: int = 0) -> tuple[Image.Image, ...]:
    """Frames of random colours."""
    rng = np.random.default_rng((count, width, height, seed))
    return tuple(
        Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)).resize(
            (width, height), Image.Resampling.BILINEAR
        )
        for _ in range(count)
    )


@cache
def moving(form: str, count: int, width: int, height: int, milliseconds: int = 200) -> bytes:
    """A file whose frames move."""
    first, *others = frames(count, width, height)
    file, more = io.BytesIO(), {"lossless": True} if form == "WEBP" else {}
    first.save(file, form, save_all=True, append_images=others, duration=milliseconds, loop=0, **more)
    return file.getvalue()


def asked(film: Any, *pictures: tuple[int, int], **more: Any) -> dict[str, Any]:
    """A message with a film and then pictures of these sizes."""
    parts = [{"type": "image", "image": made.picture(*size)} for size in pictures]
    content = [{"type": "text", "text": "See:"}, {"type": "video", "video": film, **more}, *parts]
    return {"role": "user", "content": [*content, {"type": "text", "text": "Say it."}]}


@cache
def filming(name: str, folder: Path) -> Path:
    """The checkpoint of a kind, with settings of videos that make them small."""
    directory = checkpoint(name, folder)
    if name.startswith("qwen"):
        settings = {
            "size": SHORT | ({"longest_edge": 28 * 28 * 60} if name.startswith("qwen3") else {}),
            "patch_size": 14,
        }
        (directory / "video_preprocessor_config.json").write_text(json.dumps(settings))
    return directory


def encoder_of(directory: Path) -> TransformersEncoder:
    return TransformersEncoder(directory, json.loads((directory / "config.json").read_text()))


def expected(name: str, directory: Path, message: dict[str, Any], num_tokens: int) -> list[int]:
    """The greedy tokens of transformers."""
    chat = plugin_codec(Config(), directory).encode_chat([read_turn(message)])
    placed = placed_pictures(chat.parts[NAME])
    kind, encoder = (
        made.KINDS[name],
        TransformersEncoder(directory, json.loads((directory / "config.json").read_text())),
    )
    own = made.special_tokens(kind).index(kind.tokens[0])
    ids = np.where(chat.token_ids >= FIRST_ID, own, chat.token_ids)
    types = (chat.token_ids >= FIRST_ID).astype(np.int64)
    has_own_token = encoder._films is not None and encoder._films.pixels in ("patches", "padded", "squares")
    for one in placed:
        if one.way == WAY and has_own_token:
            ids[one.places_n], types[one.places_n] = kind.config.get("video_token_id", 7), 2
    inputs = _inputs(kind, directory, encoder, placed)
    if name.startswith(("qwen", "gemma4")):
        inputs["mm_token_type_ids"] = torch.tensor(types)[None]
    if name == "qwen2_5_vl":
        films = [read_turn(message).pictures[0].film]
        seconds = [2 / (film.fps or 24) for film in films if film is not None]
        inputs["second_per_grid_ts"] = torch.tensor(seconds)
    model = getattr(transformers, f"{kind.name}ForConditionalGeneration").from_pretrained(directory).eval()
    tokens = torch.tensor(ids, dtype=torch.int64)[None]
    with torch.no_grad():
        output = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            **inputs,
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=-1,
        )
    return output[0, tokens.shape[1] :].tolist()


def _inputs(
    kind: made.Kind, directory: Path, encoder: TransformersEncoder, placed: Sequence[PlacedPicture]
) -> dict[str, Any]:
    processor = getattr(transformers, kind.processor[0]).from_pretrained(directory)
    images = [Image.open(io.BytesIO(one.data)).convert("RGB") for one in placed if one.way != WAY]
    inputs = dict(processor(images=images, return_tensors="pt", **kind.call)) if images else {}
    inputs.pop("num_soft_tokens_per_image", None)  # not for the model
    assert encoder._films is not None
    for one in placed:
        if one.way == WAY:
            inputs |= film_pixels.film_inputs(encoder._films, one.data, processor)
    return inputs


def check(name: str, folder: Path, num_tokens: int) -> None:
    """Compare an engine with transformers: a film alone and before a picture, whole and in chunks, and cached."""
    directory = filming(name, folder)
    gif, listed = moving("GIF", 7, 64, 48), [*frames(4, 50, 70)]
    mixed = (ONE[0],) if name.startswith(("qwen", "llava", "gemma4")) else ()
    messages = [asked(gif, *mixed), asked(listed, fps=2.0)]
    wanted = [expected(name, directory, one, num_tokens) for one in messages]
    assert wanted[0] != wanted[1]
    for chunk in (256, 7):
        with engine(directory, scheduler={"prefill_chunk": chunk}) as llm:
            for _ in range(2):
                assert [one.token_ids for one in chat(llm, messages, num_tokens)] == wanted
            assert encoded(llm) == 2 + len(mixed)


@pytest.mark.parametrize("name", FAST)
def test_films_give_the_tokens_of_transformers(name: str, folder: Path) -> None:
    check(name, folder, 16)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_family_gives_64_tokens_of_transformers(name: str, folder: Path) -> None:
    check(name, folder, 64)


@pytest.mark.parametrize("case", json.loads(RECORDED.read_text()), ids=lambda case: f"{case['class']}-{case['film']}")
def test_frames_and_pixels_are_those_of_the_processors(case: dict[str, Any]) -> None:
    family = FAMILIES[case["class"]]
    films = family(FamilyFiles({"vision_config": {"image_size": 56, "patch_size": 14}}, {}, {}), case["settings"])
    count, width, height, fps = case["film"]
    shown = films.shown(width, height, Film(count, fps))
    assert list(shown.indices) == case["indices"]
    if "shape" not in case:
        return
    given = frames(count, width, height)
    pixels = film_pixels.scaled([given[index] for index in shown.indices], shown, films.settings)
    if films.pixels == "patches":
        found = film_pixels.patches(pixels, films.settings)
        assert found["video_grid_thw"].tolist() == [case["grid"]]
        pixels = found["pixel_values_videos"]
    assert list(pixels.shape) == case["shape"]
    some = pixels.flatten()[:: max(1, pixels.numel() // 15)]
    one_level = 1 / 255 / min(films.settings["image_std"])  # other instructions may round to the next one
    assert torch.allclose(some, torch.tensor(case["some"]), atol=1.1 * one_level)
    assert pixels.mean().item() == pytest.approx(case["mean"], abs=0.1 * one_level)


@pytest.mark.parametrize("family", [*FAMILIES.values(), GemmaFilms])
def test_every_rate_and_length_that_is_let_in_has_a_layout(family: type[FilmFamily]) -> None:
    films = family(FamilyFiles({"vision_config": {"image_size": 56, "patch_size": 14}}, {}, {}), {})
    for fps in (0.0, LEAST_FPS, 1.0, 1e9):
        for film in (Film(2, fps), Film(18_000, fps), Film(768, fps, are_chosen=True)):
            shown = films.shown(56, 64, film)
            layout = films.layout(shown)
            assert math.isfinite(layout.interval)
            assert layout.num_rows >= len(shown.indices) // 2


def test_numbers_are_spelt_as_num2words_has_them() -> None:
    assert spelt(2_000) == "two thousand"
    assert spelt(18_041) == "eighteen thousand and forty-one"
    assert spelt(1_210) == "one thousand, two hundred and ten"


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_a_moving_file_is_read_frame_by_frame(form: str) -> None:
    turn = read_turn(asked(moving(form, 5, 20, 30, 100)))
    (film,) = turn.pictures
    assert film.film == Film(5, 10.0)
    assert (film.width, film.height) == (20, 30)
    found = film_pixels.FilmFile.read(film.data).frames([1, 4])
    near = 40 if form == "GIF" else 0
    for index, frame in zip((1, 4), found, strict=True):
        away = np.abs(np.asarray(frame, dtype=int) - np.asarray(frames(5, 20, 30)[index], dtype=int))
        assert away.mean() <= near


def test_what_is_no_film_is_refused() -> None:
    for film, reason in (
        (made.picture(9, 9), "a video of one frame"),
        (b"\0\0\0\x18ftypmp42", r"a video cannot be read|callboard\[video\]"),
        ([made.picture(9, 9)], "a video of 1 frames of 9 x 9 pixels"),
        ([made.picture(9, 9), made.picture(9, 8)], "a video of 2 frames of 9 x 8 and 9 x 9 pixels"),
        ([], "a video of 0 frames of 0 pixels"),
        (moving("GIF", 4, 20, 20)[:-300], "a video cannot be read|one frame"),
    ):
        with pytest.raises(RequestError, match=reason):
            read_turn(asked(film))
    with pytest.raises(RequestError, match="the fps of a video must be a number"):
        read_turn(asked(list(frames(2, 9, 9)), fps="two"))


def test_a_model_without_films_says_so(folder: Path) -> None:
    with (
        engine(checkpoint("llava", folder)) as llm,
        pytest.raises(RequestError, match="this model takes no videos; send pictures"),
    ):
        chat(llm, [asked(moving("GIF", 3, 40, 40))])


def test_texts_of_films_are_those_of_the_processors(folder: Path) -> None:
    for name, class_name in (("qwen3_vl", "Qwen3VLProcessor"), ("internvl", "InternVLProcessor")):
        directory = filming(name, folder)
        encoder = encoder_of(directory)
        film = Film(9, 6.0, are_chosen=True)
        layout = encoder.film_layout(64, 48, film)
        processor = object.__new__(getattr(transformers, class_name))
        token = made.KINDS[name].tokens[0]
        metadata = SimpleNamespace(fps=6.0, frames_indices=list(range(9)))
        given = {"video_grid_thw": [torch.tensor(layout.grid) * torch.tensor([1, 2, 2])], "video_metadata": [metadata]}
        given |= {"pixel_values_videos": [torch.zeros(9, 3, 2, 2)]}
        vars(processor).update(
            video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2), video_token=token, image_token=token,
            vision_start_token="<|vision_start|>", vision_end_token="<|vision_end|>", image_seq_length=4,
            start_image_token="<img>", end_image_token="</img>",
        )  # fmt: skip
        assert layout.text == processor.replace_video_token(given, 0)
        assert layout.text.count(token) == layout.num_rows
