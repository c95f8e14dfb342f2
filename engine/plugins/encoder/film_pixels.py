"""The pixels of films, as transformers' processors of videos prepare them; those need torchvision, and this does not.

Legend: F frames · P patches · C colours · H, W pixels of a side
Owns: scaling, normalizing and cutting frames.  Does not know: which frames are shown, models.
"""

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from PIL.Image import Image
from torch import Tensor

from engine.plugins.encoder.films import FilmFamily, Shown
from engine.text.film_files import FilmFile

MODES: Final = {2: "bilinear", 3: "bicubic"}  # by Pillow's numbers of filters
BICUBIC: Final = 3


def film_inputs(films: FilmFamily, data: bytes, pictures: Any) -> dict[str, Any]:
    """Return what a model's features of a film are computed from.

    data: the film.  pictures: the processor of pictures.  Raises RequestError for a film that cannot be read."""
    film = FilmFile.read(data)
    width, height = next(film.frames([0])).size
    shown = films.shown(width, height, film.film)
    frames = film.frames(shown.indices)
    if films.pixels == "pictures":
        found = pictures(images=[[*frames]], do_image_splitting=False, return_tensors="pt")
        return {name: found[name] for name in ("pixel_values", "pixel_attention_mask")}
    pixels_FCHW = scaled(frames, shown, films.settings)
    if films.pixels == "patches":
        return patches(pixels_FCHW, films.settings)
    if films.pixels == "padded":
        return padded_patches(pixels_FCHW, films.settings)
    return {"pixel_values": pixels_FCHW} if films.pixels == "frames" else {"pixel_values_videos": pixels_FCHW[None]}


def scaled(frames: Iterable[Image], shown: Shown, settings: dict[str, Any]) -> Tensor:
    """Return pixels_FCHW of frames, normalized."""
    mode, size = MODES[settings.get("resample", BICUBIC)], (shown.height, shown.width)
    found = []
    for frame in frames:  # one by one, so that few are large at once
        image_1CHW = torch.from_numpy(np.array(frame)).permute(2, 0, 1)[None].contiguous()
        if image_1CHW.shape[-2:] != size:
            image_1CHW = F.interpolate(image_1CHW, size, mode=mode, align_corners=False, antialias=True)
        found.append(image_1CHW)
    levels = 1 / settings.get("rescale_factor", 1 / 255)
    mean, spread = (torch.tensor(settings[name])[:, None, None] * levels for name in ("image_mean", "image_std"))
    return torch.cat(found).float().sub_(mean).div_(spread)


def patches(pixels_FCHW: Tensor, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Return the patches of frames in the order of Qwen's encoders, and their grid."""
    side, merged, depth = (settings[name] for name in ("patch_size", "merge_size", "temporal_patch_size"))
    if short := -len(pixels_FCHW) % depth:
        pixels_FCHW = torch.cat((pixels_FCHW, pixels_FCHW[-1:].expand(short, -1, -1, -1)))
    num_frames, colours, height, width = pixels_FCHW.shape
    grid = (num_frames // depth, height // side, width // side)
    parts = pixels_FCHW.view(
        grid[0], depth, colours, grid[1] // merged, merged, side, grid[2] // merged, merged, side
    ).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    flat = parts.reshape(-1, colours * depth * side * side)
    return {"pixel_values_videos": flat, "video_grid_thw": torch.tensor([grid])}


def padded_patches(pixels_FCHW: Tensor, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Return the patches of each frame with their columns and lines, padded to the most patches of Gemma's encoders."""
    side, num_frames = settings["patch_size"], len(pixels_FCHW)
    lines, columns = (one // side for one in pixels_FCHW.shape[-2:])
    parts = pixels_FCHW.view(num_frames, -1, lines, side, columns, side).permute(0, 2, 4, 3, 5, 1)
    flat_FPX = parts.reshape(num_frames, lines * columns, -1)
    line_P, column_P = torch.arange(lines).repeat_interleave(columns), torch.arange(columns).repeat(lines)
    places_FP2 = torch.stack((column_P, line_P), dim=-1).expand(num_frames, -1, -1)
    short = settings["max_soft_tokens"] * settings["pooling_kernel_size"] ** 2 - lines * columns
    return {
        "pixel_values_videos": F.pad(flat_FPX, (0, 0, 0, short)),
        "video_position_ids": F.pad(places_FP2, (0, 0, 0, short), value=-1),
        "num_frames_per_video": torch.tensor([num_frames]),
    }
