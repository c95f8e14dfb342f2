"""Pictures on a rank: an encoder that works next to the steps, and the steps with places of pictures.

Legend: T new tokens in the step (ragged, packed) · N rows whose logits are wanted
Owns: the encoder's thread, and which steps run without graphs.  Does not know: what an encoder computes.
"""

import logging
import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from engine.actors.runner import Answer
from engine.checkpoints.checkpoint import ModelSpec
from engine.config import without_cluster_key
from engine.execution.captured_steps import CapturedDecodes, CapturedModel
from engine.execution.features import RankContext, RankFeature
from engine.execution.needs import Needs
from engine.features.images.axes import turn_by_axes
from engine.features.images.encoder_main import EncoderTicket
from engine.features.images.fit import refusal
from engine.features.images.messages import NOT_ENCODED, EncodePicture, PictureEncoded, PictureFile
from engine.features.images.rows import PictureRows
from engine.features.images.settings import EncoderPlacement, ImageSettings
from engine.features.images.tower_process import TowerProcess
from engine.host.logs import LogSettings
from engine.layers.step import StepTensors
from engine.messages import FeatureRequest, Step
from engine.models.decoder import Decoder
from engine.models.model import Model
from engine.plugins.encoder.choice import chosen_encoder
from engine.plugins.encoder.encoder import Encoder, ToEncode, Tower, encode_each
from engine.plugins.encoder.settings import EncoderChoice
from engine.text.pictures import NAME
from engine.types.errors import RequestError, WeightsError

log = logging.getLogger(__name__)

CLOSE_S: Final = 5.0
MOST_IN_BATCH: Final = 16
# Several large pictures at once are slower than one by one where their numbers leave a CPU's caches.
MOST_ROWS: Final = {"cpu": 256, "cuda": 8192}
_Work = tuple[int, EncodePicture, Answer]


class ImagesRank(RankFeature):
    """The pictures of one rank.  most_bytes: memory of those that it keeps.

    most_rows: places of pictures that are encoded in one batch; 0 to encode each alone, for the same bits."""

    order = 90  # after features that change steps

    def __init__(
        self, rank: int, tower: Tower | TowerProcess, rows: PictureRows, most_bytes: int, most_rows: int = 0
    ) -> None:
        self._rank = rank
        self._most_rows = most_rows
        self._ahead: _Work | None = None
        self._has_ended = False
        self._most_bytes = most_bytes
        self._tower = tower
        self._rows = rows
        self._eager: Model | None = None
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._encode_all, name=f"pictures {rank}", daemon=True)
        self._thread.start()

    def needs(self, needs: Needs) -> Needs:
        """Return the needs with those of encoded pictures."""
        return replace(needs, feature_bytes=(*needs.feature_bytes, ("encoded pictures", self._most_bytes)))

    # ---- steps ------------------------------------------------------------------------------

    def around(self, model: Any) -> Any:
        """Return a model that steps with pictures can use."""
        self._eager = self._eager or model
        return PicturedModel(self._eager, model, self._rows)

    def decodes(self, whole: CapturedDecodes) -> CapturedDecodes:
        """Return decode steps that leave out those with positions of their own."""
        return PicturedDecodes(whole, self._rows)

    def apply(self, step: Step) -> Step:
        """Note which places of the step are those of pictures."""
        return self._rows.take(step)

    # ---- next to the steps ------------------------------------------------------------------

    def receive(self, message: FeatureRequest, answer: Answer) -> bool:
        if message.feature != NAME:
            return False
        self._work.put((message.number, EncodePicture.of(message), answer))
        return True

    def _encode_all(self) -> None:
        """Encode pictures, one batch after the other, until the rank ends."""
        while batch := self._batch():
            for _, wanted, _ in batch:
                for key in wanted.forget:
                    self._rows.encoded.pop(key, None)
            works = [(number, wanted.picture, answer) for number, wanted, answer in batch if wanted.picture is not None]
            found = self._encode([ToEncode(one.data, one.way, one.num_rows) for _, one, _ in works])
            for (number, picture, answer), rows in zip(works, found, strict=True):
                answer(self._kept(picture, rows).message(self._rank, number))

    def _batch(self) -> list[_Work]:
        """Return what is done at once, in its order; nothing after the end.

        A batch ends before a key of it comes again, which is to be forgotten or encoded after that."""
        batch: list[_Work] = []
        keys: set[str] = set()
        num_rows = 0
        while not self._has_ended and len(batch) < MOST_IN_BATCH:
            work, self._ahead = self._ahead or self._next(waits=not batch), None
            if work is None:
                break
            picture, forget = work[1].picture, work[1].forget
            mine = {*forget} if picture is None else {*forget, picture.key}
            num_rows += picture.num_rows if picture is not None else 0
            if batch and (keys & mine or num_rows > self._most_rows):
                self._ahead = work
                break
            batch.append(work)
            keys |= mine
        return batch

    def _next(self, *, waits: bool) -> _Work | None:
        """Return what is next in the queue; None where that is empty, or the rank ends."""
        try:
            work = self._work.get(block=waits)
        except queue.Empty:
            return None
        self._has_ended = work is None
        return work

    def _encode(self, pictures: Sequence[ToEncode]) -> Sequence[Tensor | Exception]:
        if isinstance(self._tower, TowerProcess):
            return self._tower.encode_each(pictures)
        return encode_each(self._tower, pictures)

    def _kept(self, picture: PictureFile, rows_LND: Tensor | Exception) -> PictureEncoded:
        """Keep the rows of a picture.  Return what became of it."""
        if isinstance(rows_LND, RequestError):
            return PictureEncoded(rows_LND.message, rows_LND.status)
        if isinstance(rows_LND, Exception):  # of a library, by a picture: only its requests fail
            log.error("a picture cannot be encoded", exc_info=rows_LND)
            return PictureEncoded(NOT_ENCODED, 500)
        if rows_LND.shape[1] != picture.num_rows:
            log.error("a picture has %d places, and its encoder gave %d rows", picture.num_rows, rows_LND.shape[1])
            return PictureEncoded("a picture of this request was encoded wrong; the server log has the details", 500)
        if rows_LND.is_cuda:
            torch.cuda.current_stream(rows_LND.device).synchronize()  # a step may read it from another stream
        self._rows.encoded[picture.key] = rows_LND
        return PictureEncoded()

    def close(self) -> None:
        """End the thread, and the encoder's process if it has one."""
        self.leave()
        self._thread.join(CLOSE_S)

    def leave(self) -> None:
        """End both without a wait."""
        self._work.put(None)
        if isinstance(self._tower, TowerProcess):
            self._tower.close()


class RefusingRank(RankFeature):
    """A rank whose model reads no pictures in this configuration.  reason: for clients."""

    def __init__(self, rank: int, reason: str) -> None:
        self._rank = rank
        self._reason = reason

    def receive(self, message: FeatureRequest, answer: Answer) -> bool:
        if message.feature != NAME:
            return False
        if EncodePicture.of(message).picture is not None:
            answer(PictureEncoded(self._reason).message(self._rank, message.number))
        return True


class PicturedModel:
    """A model that reads pictures.  usual: runs steps without any; other attributes are those of usual."""

    def __init__(self, eager: Any, usual: Model | CapturedModel, rows: PictureRows) -> None:
        self._eager = eager
        self._usual = usual
        self._rows = rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._usual, name)

    def forward(self, step: StepTensors) -> Tensor:
        """Return logits_NV."""
        if not self._rows.in_step:
            return self._usual.forward(step)
        return self._eager.forward(self._rows.put_into(step))

    def hidden(self, step: StepTensors, wanted_N: Tensor) -> Tensor:
        """Return x of the wanted rows."""
        if not self._rows.in_step:
            return self._usual.hidden(step, wanted_N)
        return self._eager.hidden(self._rows.put_into(step), wanted_N)


class PicturedDecodes:
    """Captured decode steps, for steps of texts; other attributes are those of the captured steps."""

    def __init__(self, captured: CapturedDecodes, rows: PictureRows) -> None:
        self._captured = captured
        self._rows = rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._captured, name)

    def fits(self, num_rows: int) -> bool:
        """Return whether there is a captured step for so many rows, none of which has positions of its own."""
        return not self._rows.in_step and self._captured.fits(num_rows)


def rank_feature(context: RankContext) -> RankFeature:
    """Return the pictures of a rank.  Raises WeightsError if the encoder that is named cannot be loaded."""
    encoder = chosen_encoder(context.config, context.spec.directory)
    if encoder is None:  # another machine may have the packages that this one lacks
        return RefusingRank(context.comm.rank, "this model takes no pictures here")
    if reason := refusal(context.spec, encoder, context.plugins.names, context.config.kv.page_size):
        log.warning("rank %d: pictures are refused: %s", context.comm.rank, reason)
        return RefusingRank(context.comm.rank, reason)
    model = context.model
    try:
        tower = _tower(context, encoder)
    except WeightsError as error:
        if EncoderChoice.of(context.config).encoder != "auto":
            raise
        log.warning("rank %d: pictures are refused: %s", context.comm.rank, error)
        return RefusingRank(context.comm.rank, "the encoder of this model's pictures cannot be loaded")
    if encoder.axes is not None:
        assert isinstance(model, Decoder), f"{type(model).__name__} has no positions with three axes"
        turn_by_axes(model, encoder.axes)
    rows = PictureRows(_token_id(context.spec), context.rows, model.attention_spec, encoder, context.device)
    row_bytes = (1 + encoder.num_deep) * context.spec.shape.hidden_size * context.dtype.itemsize
    most_bytes = ImageSettings.of(context.config).cache_tokens * row_bytes
    most_rows = 0 if context.config.model.numerics == "invariant" else MOST_ROWS.get(context.device.type, 0)
    return ImagesRank(context.comm.rank, tower, rows, most_bytes, most_rows)


def _token_id(spec: ModelSpec) -> int:
    """Return the model's own token at places of pictures."""
    config, text = spec.config, spec.config.get("text_config", {})
    if text.get("hidden_size_per_layer_input"):  # layers embed tokens, too, and padding in the place of a picture's
        return int(text.get("pad_token_id") or 0)
    token_id: int = config.get("image_token_id", config.get("image_token_index", 0))
    return token_id if token_id < spec.vocab_size else 0


def _tower(context: RankContext, encoder: Encoder) -> Tower | TowerProcess:
    """Return the part of an encoder that computes, here or in a process.  Raises WeightsError."""
    device, dtype = str(context.device), str(context.dtype).removeprefix("torch.")
    if EncoderPlacement.of(context.config).encoder == "inline":
        return encoder.tower(device, dtype)
    ticket = EncoderTicket(
        without_cluster_key(context.config),
        str(context.spec.directory),
        device,
        dtype,
        torch.get_num_threads(),
        LogSettings.here(),
        os.getpid(),
    )
    return TowerProcess(ticket, context.device, context.dtype, context.config.placement.step_timeout_s)
