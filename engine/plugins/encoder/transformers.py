"""Pictures through transformers: the vision tower, projector and image processor of the checkpoint's own model there.

Owns: which architectures it knows, and what each needs besides its layout.  Does not know: torch (``towers.py``).
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from engine.checkpoints.fields import read_fields
from engine.plugins.encoder.encoder import Axes, Encoder, Tower
from engine.plugins.encoder.films import (
    FilmFamily,
    GemmaFilms,
    InternFilms,
    OnevisionFilms,
    QwenFilms,
    SmolFilms,
    TimedQwenFilms,
)
from engine.plugins.encoder.layouts import (
    FamilyFiles,
    Layout,
    Table,
    gemma3,
    gemma4,
    idefics3,
    internvl,
    llava,
    llava_next,
    llava_onevision,
    low_gemma4,
    low_idefics3,
    low_internvl,
    low_pixtral,
    low_qwen_vl,
    pixtral,
    qwen_vl,
    side,
)
from engine.plugins.hookspecs import EncoderContext, hookimpl
from engine.text.pictures import PictureLayout
from engine.types.errors import WeightsError
from engine.types.prompt import Film

CALLBOARD_PLUGIN = {
    "api": 1,
    "packages": ["transformers", "PIL"],
    "architectures": {
        "Gemma3ForConditionalGeneration": "",
        "Gemma4ForConditionalGeneration": "",
        "Idefics3ForConditionalGeneration": "",
        "InternVLForConditionalGeneration": "",
        "LlavaForConditionalGeneration": "",
        "LlavaNextForConditionalGeneration": "",
        "LlavaOnevisionForConditionalGeneration": "",
        "Mistral3ForConditionalGeneration": "",
        "Qwen2VLForConditionalGeneration": "",
        "Qwen2_5_VLForConditionalGeneration": "",
        "Qwen3VLForConditionalGeneration": "",
        "Qwen3VLMoeForConditionalGeneration": "",
        "Qwen3_5ForConditionalGeneration": "",
        "Qwen3_5MoeForConditionalGeneration": "",
        "SmolVLMForConditionalGeneration": "",
    },
}

NOT_OF_PICTURES: Final = ("text_config", "_name_or_path", "transformers_version")
"""Fields of config.json that neither the layout nor the rows of a picture depend on."""


Whole = Literal["", "all", "windows"]


class _Family(NamedTuple):
    """A family.  placeholder, token, whole: as in ``PictureFormat``.

    arguments: those that its processor gives the image processor, besides that one's own settings.
    low: settings of the image processor that change for low detail.  films: None if it takes none."""

    layout: Callable[[FamilyFiles], Layout]
    placeholder: str
    token: str
    whole: Whole = ""
    arguments: Callable[[FamilyFiles], dict[str, Any]] = lambda files: {}
    low: Callable[[FamilyFiles], Table] = lambda files: {}
    films: type[FilmFamily] | None = None


_QWEN = _Family(qwen_vl, "<|image_pad|>", "<|image_pad|>", low=low_qwen_vl, films=QwenFilms)
_TIMED_QWEN = _QWEN._replace(films=TimedQwenFilms)
_IDEFICS = _Family(idefics3, "<image>", "<image>", low=low_idefics3)
_PIXTRAL = _Family(
    pixtral,
    "[IMG]",
    "[IMG]",
    arguments=lambda files: {"patch_size": dict.fromkeys(("height", "width"), side(files))},
    low=low_pixtral,
)
FAMILIES = {
    "Gemma4ForConditionalGeneration": _Family(
        gemma4, "<|image|>", "<|image|>", whole="windows", low=low_gemma4, films=GemmaFilms
    ),
    "Gemma3ForConditionalGeneration": _Family(gemma3, "<start_of_image>", "<image_soft_token>", whole="all"),
    "Idefics3ForConditionalGeneration": _IDEFICS,
    "InternVLForConditionalGeneration": _Family(
        internvl,
        "<IMG_CONTEXT>",
        "<IMG_CONTEXT>",
        arguments=lambda files: {"crop_to_patches": True},
        low=low_internvl,
        films=InternFilms,
    ),
    "LlavaForConditionalGeneration": _Family(llava, "<image>", "<image>"),
    "LlavaNextForConditionalGeneration": _Family(llava_next, "<image>", "<image>"),
    "LlavaOnevisionForConditionalGeneration": _Family(llava_onevision, "<image>", "<image>", films=OnevisionFilms),
    "Mistral3ForConditionalGeneration": _PIXTRAL,
    "Qwen2VLForConditionalGeneration": _QWEN,
    "Qwen2_5_VLForConditionalGeneration": _QWEN,
    "Qwen3VLForConditionalGeneration": _TIMED_QWEN,
    "Qwen3VLMoeForConditionalGeneration": _TIMED_QWEN,
    "Qwen3_5ForConditionalGeneration": _TIMED_QWEN,
    "Qwen3_5MoeForConditionalGeneration": _TIMED_QWEN,
    "SmolVLMForConditionalGeneration": _IDEFICS._replace(films=SmolFilms),
}


class TransformersEncoder(Encoder):
    """The encoder of one checkpoint."""

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        """Read the settings.  Raises WeightsError that names the file."""
        self._directory = directory
        self._architecture = config["architectures"][0]
        family = FAMILIES[self._architecture]
        if config["vision_config"].get("model_type") == "pixtral":
            family = _PIXTRAL
        processor = _table(directory / "processor_config.json")
        images = processor.get("image_processor") or _table(directory / "preprocessor_config.json")
        videos = processor.get("video_processor") or _table(directory / "video_preprocessor_config.json") or images
        try:
            files = FamilyFiles(config, processor, images)
            low, arguments = family.low(files), family.arguments(files)
            self._layouts = {"": family.layout(files)}
            self._arguments = {"": arguments}
            if low:
                self._layouts["low"] = family.layout(files.with_images(low))
                self._arguments["low"] = arguments | {name: one for name, one in low.items() if one is not None}
            self._films = family.films(files, videos) if family.films else None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise WeightsError(f"{directory}: the settings of pictures cannot be read: {error!r}") from None
        self.placeholder, self.token = family.placeholder, family.token
        self.film_placeholder = self._films.placeholder if self._films else ""
        self.whole = family.whole if _sees_whole(config) else ""
        self.axes = _axes(config)
        self.num_deep = len(config["vision_config"].get("deepstack_visual_indexes", ()))
        own = {name: value for name, value in config.items() if name not in NOT_OF_PICTURES}
        written = msgspec.json.encode(("transformers", own, processor, images, videos), order="deterministic")
        self.settings = hashlib.sha256(written).hexdigest()

    def layout(self, width: int, height: int, detail: str) -> PictureLayout:
        way = detail if detail in self._layouts else ""
        return self._layouts[way](width, height)._replace(way=way)

    def film_layout(self, width: int, height: int, film: Film) -> PictureLayout:
        assert self._films is not None, "a model without films has no placeholder for one"
        return self._films.layout(self._films.shown(width, height, film))

    def tower(self, device: str, dtype: str) -> Tower:
        from engine.plugins.encoder.towers import TransformersTower  # with torch

        return TransformersTower(self._directory, self._architecture, device, dtype, self._arguments, self._films)


def _table(path: Path) -> dict[str, Any]:
    return read_fields(path).table if path.exists() else {}


def _sees_whole(config: dict[str, Any]) -> bool:
    """Return whether a picture's tokens attend to all of it, in a family that may have that: Gemma 4 has it by size."""
    text = config.get("text_config", {})
    return config.get("model_type") != "gemma4" or text.get("use_bidirectional_attention") == "vision"


def _axes(config: dict[str, Any]) -> Axes | None:
    """Return the axes of positions; None for a model that has one."""
    text = config.get("text_config", config)
    rotary = text.get("rope_parameters") or text.get("rope_scaling") or config.get("rope_scaling") or {}
    sections = rotary.get("mrope_section")
    return Axes(tuple(sections), bool(rotary.get("mrope_interleaved", False))) if sections else None


@hookimpl
def callboard_encoder(context: EncoderContext) -> Encoder:
    """Return the encoder of a checkpoint."""
    return TransformersEncoder(context.directory, context.config)
