"""The vision tower and projector of a checkpoint in transformers, without the language model.

Legend: L layers that get rows, 1 and those of ``num_deep`` · N places of a picture in the prompt · D model dim
Owns: loading these weights alone, and one picture's way through them.  Does not know: prompts, families.

A picture is computed by itself, so that its rows have the same bits whatever else is encoded, but in batches, which
are computed at once where the files go one way.
"""

import inspect
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.utils import logging as transformers_logging

from engine.plugins.encoder.encoder import ToEncode
from engine.plugins.encoder.film_pixels import film_inputs
from engine.plugins.encoder.films import WAY, FilmFamily
from engine.text.picture_files import read_picture
from engine.types.errors import WeightsError

LOCAL = {"local_files_only": True, "trust_remote_code": False}
OF_TEXT = re.compile(r"language_model|text_model|lm_head")
PIXELS = ("pixel_values", "pixel_values_videos")
ON_DEVICE = (*PIXELS, "pixel_attention_mask", "image_position_ids", "video_position_ids")
# The dimension of tiles that do not depend on each other.  On a CPU large ones are computed one by one: the numbers of
# a tile stay in its caches, and memory is used again, which for all of them would be new to each operation.
TILES = {
    "Idefics3ForConditionalGeneration": 1,
    "InternVLForConditionalGeneration": 0,
    "SmolVLMForConditionalGeneration": 1,
}
MOST_TILE_PIXELS = 1 << 18  # of the tiles that are computed at once
SMALL_VOCABULARY = 64  # of the language model that is built without layers, and dropped
# from_pretrained replaces methods of transformers' classes for all threads while it loads, and puts back what it found.
# Two loads at once, of ranks that are threads, would leave a replacement in place.
LOADING = threading.Lock()


class TransformersTower:
    """The part of an encoder that computes."""

    def __init__(
        self,
        directory: Path,
        architecture: str,
        device: str,
        dtype: str,
        arguments: Mapping[str, Mapping[str, Any]],
        films: FilmFamily | None = None,
    ) -> None:
        """Load the weights.  arguments: of the image processor, by way.  Raises WeightsError."""
        self._arguments = arguments
        self._films = films
        self._tiles = TILES.get(architecture) if device == "cpu" else None
        self._device = device
        try:
            self._processor = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil", **LOCAL)
            with LOADING:
                model = _load(directory, architecture, getattr(torch, dtype))
        except WeightsError:
            raise
        except Exception as error:  # of transformers, which raises errors of every kind for what it lacks
            what = f"{type(error).__name__}: {error}"
            raise WeightsError(f"{directory}: the encoder of pictures cannot be loaded: {what}") from None
        self._model = model.to(device)
        self._inputs = set(inspect.signature(self._model.get_image_features).parameters)
        self.nbytes = sum(one.nbytes for one in (*self._model.parameters(), *self._model.buffers()))

    @torch.inference_mode()
    def encode(self, data: bytes, way: str) -> Tensor:
        if way == WAY and self._films is not None:
            return self._rows(film_inputs(self._films, data, self._processor))
        return self._rows(self._pixels([data], way))

    @torch.inference_mode()
    def encode_batch(self, pictures: Sequence[ToEncode]) -> list[Tensor]:
        """Return rows_LND of each picture; those of one way are computed at once."""
        found: dict[int, Tensor] = {}
        for way in dict.fromkeys(one.way for one in pictures):
            mine = [number for number, one in enumerate(pictures) if one.way == way]
            if way == WAY:
                found.update((number, self.encode(pictures[number].data, way)) for number in mine)
                continue
            rows_LTD = self._rows(self._pixels([pictures[number].data for number in mine], way))
            parts = torch.split(rows_LTD, [pictures[number].num_rows for number in mine], dim=1)
            found.update((number, part.clone()) for number, part in zip(mine, parts, strict=True))
        return [found[number] for number in range(len(pictures))]

    def _pixels(self, files: Sequence[bytes], way: str) -> dict[str, Any]:
        """Return what the features of pictures are computed from."""
        pictures = [read_picture(data) for data in files]
        found = self._processor(images=pictures, return_tensors="pt", **self._arguments[way])
        return {name: one for name, one in found.items() if name in self._inputs}

    def _rows(self, found: Mapping[str, Any]) -> Tensor:
        """Return rows_LND of all that is in the inputs, one after the other."""
        is_video = "pixel_values_videos" in found
        features = self._model.get_video_features if is_video else self._model.get_image_features
        inputs = {name: one.to(self._device) if name in ON_DEVICE else one for name, one in found.items()}
        pixels = next(name for name in PIXELS if name in inputs)
        inputs[pixels] = inputs[pixels].to(self._model.dtype)
        found_LND = []
        for part in self._parts(inputs):
            output = features(**part, return_dict=True)
            deep = getattr(output, "deepstack_features", None) or ()
            found_LND.append(torch.stack([_joined(one) for one in (output.pooler_output, *deep)]))
        return torch.cat(found_LND, dim=1)

    def _parts(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the inputs of what is computed at once."""
        if self._tiles is None:
            yield inputs
            return
        *_, height, width = shape = inputs["pixel_values"].shape
        at_once = max(1, MOST_TILE_PIXELS // (height * width))
        for first in range(0, shape[self._tiles], at_once):
            count = min(at_once, shape[self._tiles] - first)
            yield {name: one.narrow(self._tiles, first, count) for name, one in inputs.items()}


def _joined(rows: Any) -> Tensor:
    """Return rows_ND of pictures, of which a model may return several parts."""
    return torch.cat([one.flatten(0, -2) for one in rows])


def _load(directory: Path, architecture: str, dtype: torch.dtype) -> Any:
    """Return the model with a language model of no layers, and no weights of another one."""
    config = transformers.AutoConfig.from_pretrained(directory, **LOCAL)
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size = 0, SMALL_VOCABULARY
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(text, name, None):
            setattr(text, name, [])
    for name in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        if getattr(text, name, 0):
            setattr(text, name, 0)
    if getattr(config, "audio_config", None):
        config.audio_config = None
    text.pad_token_id = None
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # of the language model
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it would list every weight of the language model as unexpected
    transformers_logging.disable_progress_bar()
    try:
        whole, report = getattr(transformers, architecture).from_pretrained(
            directory,
            config=deepcopy(config),
            dtype=dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            local_files_only=True,
        )
    finally:
        transformers_logging.set_verbosity(level)
        transformers_logging.enable_progress_bar()
    mismatched = [name if isinstance(name, str) else name[0] for name in report["mismatched_keys"]]
    if lost := [name for name in (*report["missing_keys"], *mismatched) if not OF_TEXT.search(name)]:
        raise WeightsError(
            f"{directory}: the encoder of pictures lacks {len(lost)} tensors, or they have other shapes; the first is "
            f"{lost[0]}"
        )
    model = whole.model.eval().requires_grad_(False)
    for name in ("language_model", "text_model"):
        if hasattr(model, name):
            delattr(model, name)
    for module in model.modules():
        if type(module).__name__.endswith("Embeddings"):
            module.register_forward_hook(_in_a_row)
    return model


def _in_a_row(module: torch.nn.Module, given: Any, output: Any) -> Any:
    """Return embeddings whose numbers lie in a row: those of a convolution do not, and every layer would copy them."""
    return output.contiguous() if isinstance(output, Tensor) else output
