"""Pictures on a rank: an encoder that works next to the steps, and the steps with places of pictures.

Legend: T new tokens in the step (ragged, packed) · N rows whose logits are wanted
Owns: the encoder's thread, and which steps run without graphs.  Does not know: what an encoder computes.
"""

import logging
import os
import queue
import threading
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from engine.actors.runner import Answer
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
from engine.plugins.encoder.encoder import Encoder, Tower
from engine.plugins.encoder.settings import EncoderChoice
from engine.text.pictures import NAME
from engine.types.errors import RequestError, WeightsError

log = logging.getLogger(__name__)

CLOSE_S: Final = 5.0


class ImagesRank(RankFeature):
    """The pictures of one rank.  most_bytes: memory of those that it keeps."""

    order = 90  # after features that change steps

    def __init__(self, rank: int, tower: Tower | TowerProcess, rows: PictureRows, most_bytes: int) -> None:
        self._rank = rank
        self._most_bytes = most_bytes
        self._tower = tower
        self._rows = rows
        self._eager: Model | None = None
        self._work: queue.SimpleQueue[tuple[int, EncodePicture, Answer] | None] = queue.SimpleQueue()
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
        """Encode pictures, one after the other, until the rank ends."""
        while (work := self._work.get()) is not None:
            number, wanted, answer = work
            for key in wanted.forget:
                self._rows.encoded.pop(key, None)
            if wanted.picture is not None:
                answer(self._encode(wanted.picture).message(self._rank, number))

    def _encode(self, picture: PictureFile) -> PictureEncoded:
        try:
            rows_LND = self._tower.encode(picture.data, picture.way)
        except RequestError as error:
            return PictureEncoded(error.message, error.status)
        except Exception:  # of a library, by a picture: only its requests fail
            log.exception("a picture cannot be encoded")
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
    assert isinstance(model, Decoder), f"{type(model).__name__} reads no pictures"
    try:
        tower = _tower(context, encoder)
    except WeightsError as error:
        if EncoderChoice.of(context.config).encoder != "auto":
            raise
        log.warning("rank %d: pictures are refused: %s", context.comm.rank, error)
        return RefusingRank(context.comm.rank, "the encoder of this model's pictures cannot be loaded")
    config = context.spec.config
    token_id = config.get("image_token_id", config.get("image_token_index", 0))
    if encoder.axes is not None:
        turn_by_axes(model, encoder.axes)
    token_id = token_id if token_id < context.spec.vocab_size else 0
    rows = PictureRows(token_id, context.rows, model.attention_spec, encoder, context.device)
    row_bytes = (1 + encoder.num_deep) * model.shape.hidden_size * context.dtype.itemsize
    return ImagesRank(context.comm.rank, tower, rows, ImageSettings.of(context.config).cache_tokens * row_bytes)


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
