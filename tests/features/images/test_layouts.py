"""Layouts and positions are those of transformers' processors and models, and encoders conform to the kit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from engine.features.images.messages import RowPicture
from engine.features.images.positions import RowPositions
from engine.plugins.encoder.kit import check_encoder
from engine.plugins.encoder.transformers import TransformersEncoder
from engine.types.errors import RequestError, WeightsError
from tests.features.images import made

SIZES = [(1, 1), (56, 56), (57, 55), (31, 300), (300, 31), (320, 240), (101, 99), (700, 701)]
# Kinds and their processors; that of Pixtral needs torchvision.
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("LlavaProcessor", {"patch_size": 14, "vision_feature_select_strategy": "default"}),
    "llava_next": ("LlavaNextProcessor", {"patch_size": 14, "vision_feature_select_strategy": "default"}),
    "llava_onevision": (
        "LlavaOnevisionProcessor",
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_2"},
    ),
    "idefics3": ("Idefics3Processor", {"image_seq_len": 4}),
    "smolvlm": ("SmolVLMProcessor", {"image_seq_len": 4}),
    "qwen2_vl": ("Qwen2VLProcessor", {}),
    "qwen3_vl": ("Qwen3VLProcessor", {}),
    "gemma3": ("Gemma3Processor", {"image_seq_length": 16}),
    "internvl": ("InternVLProcessor", {"image_seq_length": 4}),
    "gemma4": ("Gemma4Processor", {}),
}


def encoder(directory: Path) -> TransformersEncoder:
    return TransformersEncoder(directory, json.loads((directory / "config.json").read_text()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


def text_of(name: str, directory: Path, size: tuple[int, int], /, **more: Any) -> str:
    """The text that transformers' processor puts in the place of a picture.  more: settings of that of pictures."""
    kind = made.KINDS[name]
    images = getattr(transformers, kind.processor[0]).from_pretrained(directory)
    class_name, settings = PROCESSORS[name]
    processor = object.__new__(getattr(transformers, class_name))
    vars(processor).update(settings, image_processor=images, **vars_of(name))
    rows = {"return_row_col_info": True} if "image_seq_len" in settings else {}
    found = images(images=[Image.new("RGB", size)], **kind.call, **rows, **more)
    return processor.replace_image_token(found, 0)


def vars_of(name: str) -> dict[str, Any]:
    """The attributes of a processor that its constructor reads from its tokenizer."""
    tokens = made.KINDS[name].tokens
    named = {
        "image_token": tokens[0],
        "fake_image_token": tokens[1] if len(tokens) > 1 else "",
        "num_additional_image_tokens": 1,
    }
    named |= {"global_image_token": "<global-img>", "global_image_tag": "<global-img>"}
    if name == "gemma3":
        named["full_image_sequence"] = f"\n\n{tokens[1]}{tokens[0] * 16}{tokens[2]}\n\n"
    if name == "gemma4":
        named |= {"boi_token": tokens[1], "eoi_token": tokens[2]}
    if name == "internvl":
        named |= {"start_image_token": tokens[1], "end_image_token": tokens[2]}
    return named


@pytest.mark.parametrize("name", PROCESSORS)
def test_layouts_are_those_of_the_processors(name: str, folder: Path) -> None:
    directory = made.make(name, folder / name)
    layouts = encoder(directory)
    for size in SIZES:
        layout = layouts.layout(*size, "high")
        assert layout.text == text_of(name, directory, size), size
        assert layout.text.count(layouts.token) == layout.num_rows


@pytest.mark.parametrize(
    ("name", "settings", "low"),
    [
        ("smolvlm", {}, {"do_image_splitting": False}),
        ("internvl", {}, {"max_patches": 1}),
        ("qwen2_vl", {"size": {"shortest_edge": 3136, "longest_edge": 10**6}}, {"size": {"longest_edge": 512**2}}),
        ("gemma3", {}, {}),
    ],
)
def test_low_detail_is_what_a_processor_can_do_for_fewer_tokens(
    name: str, settings: dict[str, Any], low: dict[str, Any], folder: Path
) -> None:
    directory = made.make(name, folder / f"low {name}")
    path = directory / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    layouts, size = encoder(directory), (900, 700)
    usual, fewer = (layouts.layout(*size, detail) for detail in ("auto", "low"))
    if "size" in low:
        low = {"size": settings["size"] | low["size"]}
    assert usual.text == text_of(name, directory, size)
    assert fewer.text == text_of(name, directory, size, **low)
    assert (usual.way, fewer.way) == ("", "low" if low else "")
    assert fewer.num_rows < usual.num_rows or not low


@pytest.mark.parametrize("name", ["llava", "llava_onevision", "qwen3_vl", "mistral3", "smolvlm", "internvl"])
def test_an_encoder_conforms(name: str, folder: Path) -> None:
    directory = made.make(name, folder / f"kit {name}")
    check_encoder(lambda: encoder(directory))


def test_positions_are_those_of_the_model(folder: Path) -> None:
    directory = made.make("qwen2_5_vl", folder / "positions")
    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(directory).model
    ids, grids, pictures = [3, 30, 31], [(1, 2, 3), (1, 4, 1), (1, 1, 1)], []
    for grid in grids:
        places = np.arange(len(ids) + 1, len(ids) + 1 + np.prod(grid), dtype=np.int32)
        pictures.append(RowPicture("", places.tobytes(), grid))
        ids += [8, *[6] * len(places), 9, 40, 41]
    given = torch.tensor([ids])
    thw = torch.tensor([(frames, 2 * lines, 2 * columns) for frames, lines, columns in grids])
    expected, shift = model.get_rope_index(given, (given == 6).int(), image_grid_thw=thw)
    positions = RowPositions(len(ids), pictures)
    assert (positions.positions(0, len(ids)) == expected[:, 0].numpy()).all()
    assert positions.shift == shift.item()
    assert (positions.positions(len(ids) - 1, 3)[0] == np.arange(len(ids) - 1, len(ids) + 2) + positions.shift).all()


def test_a_picture_that_the_model_cannot_take_is_refused_with_its_size(folder: Path) -> None:
    layouts = encoder(made.make("qwen2_vl", folder / "strip"))
    with pytest.raises(RequestError, match="5 x 1001 pixels: the longer side must be at most 200 times the other"):
        layouts.layout(5, 1001, "auto")
    layouts = encoder(made.make("mistral3", folder / "strip of Mistral"))
    assert layouts.layout(300, 3, "auto").num_rows > 0
    with pytest.raises(RequestError, match="1 x 300 pixels: the longer side must be at most 112 times the other"):
        layouts.layout(1, 300, "auto")


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llava", "vision_feature_select_strategy", "full"),
        ("llava", "vision_feature_layer", -1),
        ("gemma3", "mm_tokens_per_image", 4),
        ("idefics3", "scale_factor", 1),
    ],
)
def test_settings_differ_where_a_field_of_pictures_does(name: str, field: str, value: object, folder: Path) -> None:
    directory = made.make(name, folder / f"settings {name} {field}")
    config = json.loads((directory / "config.json").read_text())
    settings = TransformersEncoder(directory, config).settings
    assert TransformersEncoder(directory, config | {field: value}).settings != settings
    assert TransformersEncoder(directory, config | {"_name_or_path": "another"}).settings == settings


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llava_onevision", transformers.LlavaOnevisionConfig), ("llava_next", transformers.LlavaNextConfig)],
)
def test_what_a_configuration_leaves_out_is_as_in_its_class(name: str, kind: Any, folder: Path) -> None:
    directory = made.make(name, folder / f"defaults {name}")
    fields = ("image_grid_pinpoints", "vision_aspect_ratio", "vision_feature_select_strategy")
    config = json.loads((directory / "config.json").read_text())
    default = {field: value for field in fields if (value := getattr(kind(), field, None)) is not None}
    without = {field: value for field, value in config.items() if field not in fields}
    for given in (without, without | {"image_grid_pinpoints": None}):
        assert all(
            TransformersEncoder(directory, given).layout(*size, "auto")
            == TransformersEncoder(directory, config | default).layout(*size, "auto")
            for size in ((50, 31), (500, 400), (3000, 2500))
        )


def test_a_tower_that_transformers_cannot_load_is_an_error_with_its_text(folder: Path) -> None:
    directory = made.make("llava", folder / "no processor")
    layouts = encoder(directory)
    (directory / "preprocessor_config.json").unlink()
    with pytest.raises(WeightsError, match="the encoder of pictures cannot be loaded: OSError: "):
        layouts.tower("cpu", "float32")


@pytest.mark.parametrize("start", [0, 3, 9, 11, 12, 20])
def test_positions_lie_in_rows_wherever_they_begin(start: int) -> None:
    places = np.arange(4, 10, dtype=np.int32)
    positions = RowPositions(12, [RowPicture("", places.tobytes(), (1, 2, 3))])
    found = positions.positions(start, 5)
    assert found.shape == (3, 5)
    assert all(one.flags.c_contiguous for one in np.concatenate([found, found], axis=1)), "they cannot be uploaded"
    assert found[0].tolist() == [int(positions.positions(at, 1)[0, 0]) for at in range(start, start + 5)]
