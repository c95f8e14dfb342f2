"""The places of films in prompts, by family: which frames a model is shown, their size, and the text around them.

Owns: the arithmetic of each family's processor of videos, without decoding or computing anything.
Does not know: torch, pixels, token ids.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import numpy as np

from engine.plugins.encoder.layouts import MOST_RATIO, FamilyFiles, check_strip, gemma4_grid
from engine.text.pictures import PictureLayout
from engine.types.errors import RequestError
from engine.types.prompt import Film

UNKNOWN_FPS = 24  # transformers' own for films that do not say it
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
WAY = "film"
ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


class Shown(NamedTuple):
    """The frames of a film that a model is shown.

    indices: their numbers, ascending.  width, height: pixels to which they are scaled."""

    film: Film
    indices: Sequence[int]
    width: int
    height: int

    @property
    def fps(self) -> float:
        """The film's frames a second."""
        return self.film.fps or UNKNOWN_FPS

    @property
    def seconds(self) -> list[float]:
        """The time of each frame."""
        return [index / self.fps for index in self.indices]


class FilmFamily(ABC):
    """A family that takes films.  placeholder: as in ``FilmFormat``.

    pixels: what its encoder takes: 'patches' of frames, 'padded' ones, 'squares' of a video, of 'frames', or its own
    'pictures'.
    defaults: settings of its processor of videos.  settings: those of the checkpoint with these."""

    placeholder = "<video>"
    pixels: ClassVar[str] = "squares"
    defaults: ClassVar[dict[str, Any]] = {
        "image_mean": CLIP_MEAN, "image_std": CLIP_STD, "size": {"height": 384, "width": 384},
    }  # fmt: skip

    def __init__(self, files: FamilyFiles, videos: dict[str, Any]) -> None:
        """Keep what is read.  videos: the settings of the checkpoint's processor of videos."""
        self.settings: dict[str, Any] = self.defaults | {name: one for name, one in videos.items() if one is not None}
        self._files = files

    def shown(self, width: int, height: int, film: Film) -> Shown:
        """Return the frames of a film that the model is shown."""
        indices = self.chosen(film) if self._chooses and not film.are_chosen else range(film.num_frames)
        size = self.size(width, height, len(indices))
        return Shown(film, indices, *size)

    @property
    def _chooses(self) -> bool:
        return bool(self.settings.get("do_sample_frames"))

    def chosen(self, film: Film) -> Sequence[int]:
        """Return the numbers of the frames to show."""
        return evenly(film.num_frames, self._wanted(film))

    def _wanted(self, film: Film) -> float | None:
        """Return the number of frames that the settings ask for; None for all."""
        wanted: float | None = self.settings.get("num_frames")
        if wanted is None and (fps := self.settings.get("fps")) is not None:
            wanted = int(film.num_frames / (film.fps or UNKNOWN_FPS) * fps)
        return wanted if wanted is None else max(1, min(wanted, film.num_frames))

    def size(self, width: int, height: int, num_frames: int) -> tuple[int, int]:
        """Return width and height to which frames are scaled.  Raises RequestError."""
        return self.settings["size"]["width"], self.settings["size"]["height"]

    @abstractmethod
    def layout(self, shown: Shown) -> PictureLayout:
        """Return the layout of these frames."""


def evenly(total: int, wanted: float | None, first: float = 0) -> list[int]:
    """Return so many of ``total`` numbers, from ``first`` on, as torch's ``arange`` steps through them."""
    if wanted is None:
        return list(range(total))
    step = total / wanted
    return [int(np.float32(first + number * step)) for number in range(math.ceil((total - first) / step))]


class QwenFilms(FilmFamily):
    """Films of Qwen2-VL and Qwen2.5-VL: a place for each square of patches of two frames."""

    placeholder = "<|video_pad|>"
    pixels = "patches"
    defaults: ClassVar[dict[str, Any]] = {
        "image_mean": CLIP_MEAN, "image_std": CLIP_STD, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
        "min_frames": 4, "max_frames": 768, "max_video_tokens": 128000,
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
    }  # fmt: skip

    def __init__(self, files: FamilyFiles, videos: dict[str, Any]) -> None:
        super().__init__(files, videos)
        self._factor: int = self.settings["patch_size"] * self.settings["merge_size"]
        self._merged: int = self.settings["temporal_patch_size"]
        size = self.settings["size"]
        self._least = self.settings.get("min_pixels") or size["shortest_edge"]
        self._most = self.settings.get("max_pixels") or size["longest_edge"]

    def _wanted(self, film: Film) -> float | None:
        if (number := self.settings.get("num_frames")) is not None:
            rounded: float = round(number / self._merged) * self._merged
            return min(rounded, film.num_frames)
        if (fps := self.settings.get("fps")) is None:
            return None
        most: float = math.floor(min(self.settings["max_frames"], film.num_frames) / self._merged) * self._merged
        wanted: float = max(film.num_frames / (film.fps or UNKNOWN_FPS) * fps, self.settings["min_frames"])
        return max(float(math.floor(min(wanted, most) / self._merged) * self._merged), 1.0)

    def size(self, width: int, height: int, num_frames: int) -> tuple[int, int]:
        most = self._most
        if self.settings.get("cap_pixels_per_frame"):
            total = int(self.settings["max_video_tokens"] * self._factor**2 * 0.9)
            most = max(min(most, total * self._merged // num_frames), int(self._least * 1.05))
        return self._scaled(width, height, 1, self._least, most)

    def _scaled(self, width: int, height: int, num_frames: int, least: int, most: int) -> tuple[int, int]:
        """Return width and height of frames that have so many pixels together."""
        check_strip(width, height, MOST_RATIO)
        factor = self._factor
        lines, columns = round(height / factor), round(width / factor)
        counted = num_frames if num_frames == 1 else round(num_frames / self._merged) * self._merged
        if counted * lines * columns * factor**2 > most:
            by = math.sqrt((num_frames * height * width) / most)
            lines, columns = max(1, math.floor(height / by / factor)), max(1, math.floor(width / by / factor))
        elif counted * lines * columns * factor**2 < least:
            by = math.sqrt(least / (num_frames * height * width))
            lines, columns = math.ceil(height * by / factor), math.ceil(width * by / factor)
        return columns * factor, lines * factor

    def layout(self, shown: Shown) -> PictureLayout:
        grid = self._grid(shown)
        count = math.prod(grid)
        return PictureLayout("<|image_pad|>" * count, count, grid, WAY, self._interval(shown))

    def _grid(self, shown: Shown) -> tuple[int, int, int]:
        frames = math.ceil(len(shown.indices) / self._merged)
        return frames, shown.height // self._factor, shown.width // self._factor

    def _interval(self, shown: Shown) -> float:
        """Return the interval of the positions of frames, which has their seconds in Qwen2.5-VL."""
        if (rate := self._files.config["vision_config"].get("tokens_per_second")) is None:
            return 1.0
        shown_fps = len(shown.indices) / shown.film.num_frames * shown.fps
        return float(rate * np.float32(self._merged / shown_fps))


class TimedQwenFilms(QwenFilms):
    """Films of Qwen3-VL and Qwen3.5: each two frames stand alone, behind their time."""

    placeholder = "<|vision_start|><|video_pad|><|vision_end|>"
    defaults: ClassVar[dict[str, Any]] = {
        "image_mean": (0.5,) * 3, "image_std": (0.5,) * 3, "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2,
        "min_frames": 4, "max_frames": 768, "max_video_tokens": 768, "fps": 2, "do_sample_frames": True,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
    }  # fmt: skip

    def chosen(self, film: Film) -> Sequence[int]:
        wanted = self.settings.get("num_frames")
        if wanted is None:
            wanted = int(film.num_frames / (film.fps or UNKNOWN_FPS) * self.settings["fps"])
            wanted = min(max(wanted, self.settings["min_frames"]), self.settings["max_frames"], film.num_frames)
        indices: list[int] = np.linspace(0, film.num_frames - 1, wanted).round().astype(int).tolist()
        return indices

    def size(self, width: int, height: int, num_frames: int) -> tuple[int, int]:
        most = self._most
        if self.settings.get("cap_pixels_per_frame"):
            cap = self.settings["max_video_tokens"] * self._factor**2
            most = max(min(cap, most // num_frames), int(self._least * 1.05)) * num_frames
        if min(width, height) < self._factor:
            scale = max(self._factor / height, self._factor / width)
            width, height = int(width * scale), int(height * scale)
        if num_frames < self._merged:
            raise RequestError(f"a video of {num_frames} frames; at least {self._merged} are needed", param="messages")
        return self._scaled(width, height, num_frames, self._least, most)

    def layout(self, shown: Shown) -> PictureLayout:
        grid, seconds = self._grid(shown), shown.seconds
        seconds += seconds[-1:] * (-len(seconds) % self._merged)
        text = "".join(
            f"<{(seconds[at] + seconds[at + self._merged - 1]) / 2:.1f} seconds>"
            f"<|vision_start|>{'<|image_pad|>' * math.prod(grid[1:])}<|vision_end|>"
            for at in range(0, len(seconds), self._merged)
        )
        return PictureLayout(text, math.prod(grid), grid, WAY)


class OnevisionFilms(FilmFamily):
    """Films of LLaVA-OneVision: a fixed number of places for each frame, and one at the end."""

    def layout(self, shown: Shown) -> PictureLayout:
        vision = self._files.config["vision_config"]
        count = len(shown.indices) * math.ceil(vision["image_size"] // vision["patch_size"] / 2) ** 2 + 1
        return PictureLayout("<image>" * count, count, way=WAY)


class InternFilms(FilmFamily):
    """Films of InternVL 3: numbered frames of one tile."""

    pixels = "frames"

    def chosen(self, film: Film) -> Sequence[int]:
        wanted, shift = self._wanted(film), self.settings.get("initial_shift", True)
        if wanted is not None and shift is True:
            shift = film.num_frames / wanted / 2
        return evenly(film.num_frames, wanted, float(shift))

    def layout(self, shown: Shown) -> PictureLayout:
        files = self._files
        count = files.processor.get("image_seq_length") or files.config.get("image_seq_length", 256)
        frame = f"<img>{'<IMG_CONTEXT>' * count}</img>"
        text = "\n".join(f"Frame{number + 1}: {frame}" for number in range(len(shown.indices)))
        return PictureLayout(text, count * len(shown.indices), way=WAY)


class SmolFilms(FilmFamily):
    """Films of SmolVLM: frames of one tile with their times, behind a sentence about all of them."""

    pixels = "pictures"

    @property
    def _chooses(self) -> bool:
        return super()._chooses or "video_sampling" in self.settings

    def chosen(self, film: Film) -> Sequence[int]:
        sampling = self.settings.get("video_sampling", {})
        most = sampling.get("max_frames", self.settings.get("num_frames")) or film.num_frames
        rate = sampling.get("fps", self.settings.get("fps")) or 1
        fps = film.fps or UNKNOWN_FPS
        duration, last = film.num_frames / fps, film.num_frames - 1
        wanted, start, end = max(1, min(round(rate * duration), most)), 0, last
        if duration - 2 > most * rate:  # a second is left out at both ends
            start, end = int(fps), min(int(film.num_frames - fps), last)
        indices: list[int] = np.unique(np.linspace(start, end, wanted, dtype=int)).tolist()
        return indices

    def size(self, width: int, height: int, num_frames: int) -> tuple[int, int]:
        return width, height

    def layout(self, shown: Shown) -> PictureLayout:
        vision, files = self._files.config["vision_config"], self._files
        sides = vision["image_size"] // vision["patch_size"] // files.config.get("scale_factor", 2)
        count = files.processor.get("image_seq_len") or sides**2
        fake, num = "<fake_token_around_image>", len(shown.indices)
        frame = f"{fake}<global-img>{'<image>' * count}{fake}"
        length = timedelta(seconds=int(shown.film.num_frames / shown.fps if shown.film.fps else shown.seconds[-1]))
        text = f"You are provided the following series of {spelt(num)} frames from a {length} [H:MM:SS] video.\n"
        for second in shown.seconds:
            text += f"\nFrame from {int(second // 60):02d}:{int(second % 60):02d}:{frame}"
        return PictureLayout(f"{text}\n\n", count * num, way=WAY)


class GemmaFilms(FilmFamily):
    """Films of Gemma 4: frames that are scaled to have few places, each behind its time."""

    placeholder = "<|video|>"
    pixels = "padded"
    defaults: ClassVar[dict[str, Any]] = {
        "image_mean": (0.0,) * 3, "image_std": (1.0,) * 3, "patch_size": 16, "pooling_kernel_size": 3,
        "max_soft_tokens": 70, "num_frames": 32, "do_sample_frames": True,
    }  # fmt: skip

    def __init__(self, files: FamilyFiles, videos: dict[str, Any]) -> None:
        super().__init__(files, videos)
        self._side: int = self.settings["patch_size"] * self.settings["pooling_kernel_size"]

    def chosen(self, film: Film) -> Sequence[int]:
        wanted = min(self.settings["num_frames"] or film.num_frames, film.num_frames)
        return [number * film.num_frames // wanted for number in range(wanted)]

    def size(self, width: int, height: int, num_frames: int) -> tuple[int, int]:
        lines, columns = gemma4_grid(width, height, self._side, self.settings["max_soft_tokens"])
        return columns * self._side, lines * self._side

    def layout(self, shown: Shown) -> PictureLayout:
        count = (shown.width // self._side) * (shown.height // self._side)
        text = " ".join(
            f"{int(second // 60):02d}:{int(second % 60):02d} <|image>{'<|image|>' * count}<image|>"
            for second in shown.seconds
        )
        return PictureLayout(text, count * len(shown.indices), way=WAY)


def spelt(number: int) -> str:
    """Return a number below 1,000,000 in English words."""
    if number >= 1000:
        rest = f"{' and' if number % 1000 < 100 else ','} {spelt(number % 1000)}" if number % 1000 else ""
        return f"{spelt(number // 1000)} thousand{rest}"
    if number >= 100:
        rest = f" and {spelt(number % 100)}" if number % 100 else ""
        return f"{ONES[number // 100]} hundred{rest}"
    if number < len(ONES):
        return ONES[number]
    return TENS[number // 10] + (f"-{ONES[number % 10]}" if number % 10 else "")
