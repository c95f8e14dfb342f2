"""Encodes a picture as patches that one matrix projects, as Fuyu does, for a model that was trained so.

The matrix is the tensor ``projection`` of ``patches.safetensors`` beside the checkpoint: as many rows as the model is
wide, and a column for each colour of each pixel of a patch.

Legend: N patches · P colours of a patch's pixels · D model dim"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from callboard.plugins import (
    Encoder,
    EncoderContext,
    Options,
    PictureLayout,
    WeightsError,
    decode_options,
    hookimpl,
    read_picture,
)

if TYPE_CHECKING:
    from torch import Tensor

CALLBOARD_PLUGIN = {"api": 1, "packages": ["PIL"], "architectures": {"LlavaForConditionalGeneration": ""}}


class PatchesOptions(Options, frozen=True):
    """The options.  sides: patches in a line and in a column.  pixels: of a patch's side."""

    sides: Annotated[int, Meta(ge=2)] = 4
    pixels: Annotated[int, Meta(ge=1)] = 8


class PatchTower:
    """The part with the matrix, which ranks use.  nbytes: of it."""

    def __init__(self, projection_DP: "Tensor", options: PatchesOptions) -> None:
        self.nbytes = projection_DP.nbytes
        self._projection_DP = projection_DP
        self._options = options

    def encode(self, data: bytes, way: str) -> "Tensor":
        """Return rows [1, N, D] of a picture.  way: always '', the one of our layouts."""
        import torch  # installed where ranks run, and not needed where requests are read

        sides, pixels = self._options.sides, self._options.pixels
        picture = read_picture(data).resize((sides * pixels, sides * pixels))
        colours = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        lines = colours.view(sides, pixels, sides, pixels, 3).transpose(1, 2)
        colours_NP = lines.reshape(sides * sides, -1).to(self._projection_DP) / 127.5 - 1.0
        return (colours_NP @ self._projection_DP.T)[None]


class Patches(Encoder):
    """The encoder of one checkpoint.  Only ``tower`` imports torch."""

    placeholder = token = "<image>"  # noqa: S105
    axes, whole, num_deep = None, "", 0

    def __init__(self, file: Path, options: PatchesOptions) -> None:
        """Read the settings.  Raises WeightsError that names the file."""
        self._file = file
        self._options = options
        try:
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
        except OSError as error:
            raise WeightsError(f"{file}: {error.strerror}; the matrix of patches is expected there") from None
        self.settings = f"patches {options.sides} {options.pixels} {digest}"

    def layout(self, width: int, height: int, detail: str) -> PictureLayout:
        """Return as many tokens for a picture of any size and detail."""
        count = self._options.sides**2
        return PictureLayout(self.token * count, count)

    def tower(self, device: str, dtype: str) -> PatchTower:
        """Return the part with the matrix.  Raises WeightsError for one of another shape."""
        import torch
        from safetensors.torch import load_file

        projection_DP = load_file(self._file)["projection"]
        if projection_DP.shape[1:] != (3 * self._options.pixels**2,):
            raise WeightsError(f"{self._file}: projection has the shape {tuple(projection_DP.shape)}")
        return PatchTower(projection_DP.to(device, getattr(torch, dtype)), self._options)


@hookimpl
def callboard_encoder(context: EncoderContext) -> Encoder:
    """Options: see ``PatchesOptions``."""
    options = decode_options("encoder.patches", context.options, PatchesOptions)
    return Patches(context.directory / "patches.safetensors", options)
