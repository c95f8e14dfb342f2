"""The places of pictures in prompts, by family: how many tokens a picture of some size has, and the text around them.

Owns: the arithmetic of each family's processor, without decoding or computing anything.
Does not know: torch, pixels, token ids.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from engine.text.pictures import PictureLayout
from engine.types.errors import RequestError

Layout = Callable[[int, int], PictureLayout]
"""Returns the layout of a picture of a width and a height."""
Table = Mapping[str, Any]
MOST_RATIO = 200  # Qwen's processor refuses longer strips
LEAST_SHRINKING = 1.1  # OneVision shrinks no grid of fewer places
LARGEST_SIDE = 4096  # Idefics3's processor shrinks to this side
NEXT_DEFAULTS = {"image_grid_pinpoints": [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)]}
ONEVISION_DEFAULTS = {
    "image_grid_pinpoints": list(product(range(384, 2305, 384), repeat=2)),
    "vision_aspect_ratio": "anyres_max_9",
    "vision_feature_select_strategy": "full",
}

LOW_SIDE = 512  # pixels to which a picture of low detail is shrunk


class FamilyFiles(NamedTuple):
    """The settings that a family reads: config.json, those of its processor, those of its image processor."""

    config: Table
    processor: Table
    images: Table

    def with_defaults(self, defaults: Table) -> "FamilyFiles":
        """Return these with values for what config.json leaves out."""
        return self._replace(config={**defaults, **{name: one for name, one in self.config.items() if one is not None}})

    def with_images(self, changed: Table) -> "FamilyFiles":
        """Return these with other settings of the image processor."""
        return self._replace(images={**self.images, **changed})


def llava(files: FamilyFiles) -> Layout:
    """Return the layout of LLaVA 1.5: every picture has the same number of places."""
    count = _places(files, _sides(files))
    return lambda width, height: PictureLayout("<image>" * count, count)


def _sides(files: FamilyFiles) -> int:
    """Return the patches in a line of a tile."""
    vision = files.config["vision_config"]
    sides: int = vision["image_size"] // vision["patch_size"]
    return sides


def _places(files: FamilyFiles, sides: int) -> int:
    """Return the places of a tile in LLaVA's models, which may have one for its class before those of its patches."""
    has_class = "clip" in files.config["vision_config"].get("model_type", "clip_vision_model")
    drops_first: bool = files.config.get("vision_feature_select_strategy", "default") == "default"
    return sides**2 + has_class - drops_first


def llava_next(files: FamilyFiles) -> Layout:
    """Return the layout of LLaVA-NeXT."""
    return _any_resolution(files.with_defaults(NEXT_DEFAULTS))


def llava_onevision(files: FamilyFiles) -> Layout:
    """Return the layout of LLaVA-OneVision."""
    return _any_resolution(files.with_defaults(ONEVISION_DEFAULTS))


def _any_resolution(files: FamilyFiles) -> Layout:
    """Return a layout with the whole picture, and tiles in the best of some grids.

    The tiles' places are those of one large picture, without the border that fills the grid, and each line of them has
    one more at its end."""
    tile, sides = files.config["vision_config"]["image_size"], _sides(files)
    whole, grids = _places(files, sides), [tuple(one) for one in files.config["image_grid_pinpoints"]]
    most_tiles = float(files.config.get("vision_aspect_ratio", "anyres_max_inf").removeprefix("anyres_max_"))

    def layout(width: int, height: int) -> PictureLayout:
        grid_height, grid_width = _best_grid(width, height, grids)
        lines, columns = grid_height // tile * sides, grid_width // tile * sides
        if width / height > columns / lines:
            lines -= (lines - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (lines / height), 7))) // 2 * 2
        if (ratio := math.sqrt(lines * columns / (most_tiles * sides**2))) > LEAST_SHRINKING:
            lines, columns = int(lines // ratio), int(columns // ratio)
        count = whole + lines * (columns + 1)
        return PictureLayout("<image>" * count, count)

    return layout


def _best_grid(width: int, height: int, grids: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return height and width of the grid that shows the most pixels of a picture, and of these the smallest."""

    def fit(grid: tuple[int, int]) -> tuple[int, int]:
        scale = min(grid[1] / width, grid[0] / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        return shown, shown - math.prod(grid)

    return max(grids, key=fit)


def idefics3(files: FamilyFiles) -> Layout:
    """Return the layout of Idefics3 and SmolVLM: tiles in lines and columns, and the whole picture."""
    vision, images = files.config["vision_config"], files.images
    sides = vision["image_size"] // vision["patch_size"] // files.config.get("scale_factor", 2)
    count = files.processor.get("image_seq_len") or sides**2
    longest = images.get("size", {}).get("longest_edge", 4 * 364)
    tile = images.get("max_image_size", {}).get("longest_edge", 364)
    fake, whole, tokens = "<fake_token_around_image>", "<global-img>", "<image>" * count

    def layout(width: int, height: int) -> PictureLayout:
        lines, columns = _tiles(width, height, longest, tile) if images.get("do_image_splitting", True) else (0, 0)
        text = "".join(
            "".join(f"{fake}<row_{line}_col_{column}>{tokens}" for column in range(1, columns + 1)) + "\n"
            for line in range(1, lines + 1)
        )
        between = "\n" if lines else ""
        return PictureLayout(f"{text}{between}{fake}{whole}{tokens}{fake}", count * (lines * columns + 1))

    return layout


def _tiles(width: int, height: int, longest: int, tile: int) -> tuple[int, int]:
    """Return lines and columns of tiles; zeros for a picture that fits one."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > LARGEST_SIDE:
        width, height = LARGEST_SIDE, int(LARGEST_SIDE / ratio)
    elif height > width and height > LARGEST_SIDE:
        height, width = LARGEST_SIDE, int(LARGEST_SIDE * ratio)
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    if height <= tile and width <= tile:
        return 0, 0
    return math.ceil(height / tile), math.ceil(width / tile)


def qwen_vl(files: FamilyFiles) -> Layout:
    """Return the layout of Qwen's models: a place for each square of patches, which has frame, line and column."""
    vision, images = files.config["vision_config"], files.images
    factor = images.get("patch_size", vision.get("patch_size", 14)) * images.get("merge_size", 2)
    least, most = _pixels(images)

    def layout(width: int, height: int) -> PictureLayout:
        check_strip(width, height, MOST_RATIO)
        lines, columns = round(height / factor), round(width / factor)
        if lines * columns * factor**2 > most:
            by = math.sqrt((height * width) / most)
            lines, columns = max(1, math.floor(height / by / factor)), max(1, math.floor(width / by / factor))
        elif lines * columns * factor**2 < least:
            by = math.sqrt(least / (height * width))
            lines, columns = math.ceil(height * by / factor), math.ceil(width * by / factor)
        return PictureLayout("<|image_pad|>" * (lines * columns), lines * columns, (1, lines, columns))

    return layout


def _pixels(images: Table) -> tuple[int, int]:
    """Return the fewest and the most pixels of a picture, by the settings of Qwen's image processor."""
    size = images.get("size") or {}
    least = images.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels", 56 * 56)
    most = images.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels", 28 * 28 * 1280)
    return least, most


def low_qwen_vl(files: FamilyFiles) -> Table:
    """Return the settings for low detail: fewer pixels."""
    least, most = (min(one, LOW_SIDE**2) for one in _pixels(files.images))
    return {"size": {"shortest_edge": least, "longest_edge": most}, "min_pixels": None, "max_pixels": None}


def low_idefics3(files: FamilyFiles) -> Table:
    """Return the settings for low detail: the whole picture without tiles."""
    return {"do_image_splitting": False}


def low_pixtral(files: FamilyFiles) -> Table:
    """Return the settings for low detail: a shorter side."""
    longest = files.images.get("size", {}).get("longest_edge", 1024)
    return {"size": {"longest_edge": min(longest, LOW_SIDE)}}


def low_internvl(files: FamilyFiles) -> Table:
    """Return the settings for low detail: one tile."""
    return {"min_patches": 1, "max_patches": 1}


def check_strip(width: int, height: int, most: int) -> None:
    """Raise RequestError if the longer side is more than ``most`` times the other."""
    if max(width, height) > most * min(width, height):
        raise RequestError(
            f"a picture of {width} x {height} pixels: the longer side must be at most {most} times the other",
            param="messages",
        )


def gemma3(files: FamilyFiles) -> Layout:
    """Return the layout of Gemma 3: a fixed number of places between marks and blank lines."""
    if files.images.get("do_pan_and_scan"):
        raise ValueError("do_pan_and_scan, which cuts pictures into crops, is not served")
    count = files.processor.get("image_seq_length") or files.config.get("mm_tokens_per_image", 256)
    text = f"\n\n<start_of_image>{'<image_soft_token>' * count}<end_of_image>\n\n"
    return lambda width, height: PictureLayout(text, count)


def gemma4(files: FamilyFiles) -> Layout:
    """Return the layout of Gemma 4: a place for each square of patches of a picture that is scaled to have many."""
    vision, images = files.config["vision_config"], files.images
    pooled = images.get("pooling_kernel_size", vision.get("pooling_kernel_size", 3))
    side, most = images.get("patch_size", vision.get("patch_size", 16)) * pooled, images.get("max_soft_tokens", 280)

    def layout(width: int, height: int) -> PictureLayout:
        lines, columns = gemma4_grid(width, height, side, most)
        count = lines * columns
        return PictureLayout(f"<|image>{'<|image|>' * count}<image|>", count)

    return layout


def gemma4_grid(width: int, height: int, side: int, most: int) -> tuple[int, int]:
    """Return lines and columns of the most places of a picture in Gemma 4.  side: pixels of a place's side."""
    factor = math.sqrt(most * side**2 / (width * height))
    lines, columns = math.floor(factor * height / side), math.floor(factor * width / side)
    if not lines:
        return 1, min(width // height, most)
    if not columns:
        return min(height // width, most), 1
    return lines, columns


def low_gemma4(files: FamilyFiles) -> Table:
    """Return the settings for low detail: the fewest tokens that its processor takes."""
    return {"max_soft_tokens": 70}


def pixtral(files: FamilyFiles) -> Layout:
    """Return the layout of Pixtral and Mistral 3: lines of places with a break after each."""
    factor = side(files)
    size = files.images.get("size", {})
    longest = size.get("longest_edge", 1024)

    def layout(width: int, height: int) -> PictureLayout:
        check_strip(width, height, longest)  # a longer strip has no line, or no column, once it is shrunk
        if (ratio := max(width, height) / longest) > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
        lines, columns = (height - 1) // factor + 1, (width - 1) // factor + 1
        text = "[IMG_BREAK]".join(["[IMG]" * columns] * lines)
        return PictureLayout(f"{text}[IMG_END]", lines * columns)

    return layout


def side(files: FamilyFiles) -> int:
    """Return the pixels of a side of one of Pixtral's places."""
    patch: int = files.config["vision_config"].get("patch_size", 16)
    merged: int = files.config.get("spatial_merge_size", 1)
    return patch * merged


def internvl(files: FamilyFiles) -> Layout:
    """Return the layout of InternVL 3: tiles of a fixed number of places, and the whole picture where there are two."""
    images, count = files.images, files.processor.get("image_seq_length") or files.config.get("image_seq_length", 256)
    size = images.get("size", {})
    tile_height, tile_width = size.get("height", 448), size.get("width", 448)
    least, most = images.get("min_patches", 1), images.get("max_patches", 12)
    shapes = [(columns, lines) for columns in range(1, most + 1) for lines in range(1, most + 1)]
    shapes = sorted((one for one in shapes if least <= one[0] * one[1] <= most), key=math.prod)

    def layout(width: int, height: int) -> PictureLayout:
        best, apart = (1, 1), math.inf
        for shape in shapes:
            off = abs(width / height - shape[0] / shape[1])
            if off < apart or (off == apart and width * height > 0.5 * tile_height * tile_width * math.prod(shape)):
                best, apart = shape, off
        tiles = math.prod(best)
        num_rows = count * (tiles + (tiles > 1))
        return PictureLayout(f"<img>{'<IMG_CONTEXT>' * num_rows}</img>", num_rows)

    return layout
