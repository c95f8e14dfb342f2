"""A rank's head, of EAGLE-3 or of the model itself: its weights, its pool, and the states that the model leaves for it.

Owns: how they are put together, the table from the head's tokens to the model's.  Does not know: steps.
"""

import logging
from dataclasses import replace
from pathlib import Path

import torch
from msgspec import structs
from torch import Tensor

from engine.checkpoints.checkpoint import ModelSpec
from engine.checkpoints.shards import read_shards
from engine.execution.features import RankContext
from engine.execution.rows import DeviceRows
from engine.features.speculation.draft_model import RankDraft
from engine.features.speculation.fitting import stores
from engine.features.speculation.head_drafting import HeadDrafter, KeptStates
from engine.features.speculation.head_files import TO_MODEL, EagleHeadShape, read_eagle_head
from engine.features.speculation.head_model import StatesHead
from engine.features.speculation.mtp_files import read_mtp_head
from engine.formats.reader import SafetensorsReader
from engine.layers.kv_pool import KVPool
from engine.models.decoder import Decoder
from engine.scheduling.proposer import DraftModel
from engine.types.errors import WeightsError

log = logging.getLogger(__name__)


class RankHead(RankDraft):
    """A head with its weights, and the states of the model that it reads."""

    def __init__(self, draft: DraftModel, context: RankContext) -> None:
        # States and keys of the head have one layer, and so the same slots.
        config = structs.replace(context.config, kv=structs.replace(context.config.kv, layout="layer_first"))
        super().__init__(draft, replace(context, config=config))
        assert isinstance(self.model, StatesHead), f"{draft.path} is no head"
        self._head = self.model
        self._states: KeptStates | None = None
        shape = self._head.shape
        self._to_model_V = None
        if config.model.load_format == "safetensors" and isinstance(shape, EagleHeadShape):
            self._to_model_V = _to_model(Path(draft.path), shape, self._device)
        size = config.kv.page_size
        self.page_bytes += KVPool.page_bytes(1, size, 1, shape.hidden_size, self._dtype, "", shape.hidden_size)

    def _read_spec(self, directory: Path) -> ModelSpec:
        if self._draft.is_part:
            return read_mtp_head(directory, self._config.plugins, self._config.model)
        return read_eagle_head(directory)

    def _directory(self, target: ModelSpec) -> Path | None:
        own, is_read = target.shape.predictor, self._config.model.load_format == "safetensors"
        if not self._draft.is_part or own is None:
            return super()._directory(target)
        if is_read and not stores(target, own):
            log.warning("%s has no tensors %s.*: the layer that drafts stays as it was", target.directory, own.stem)
            return super()._directory(target)
        return target.directory

    def prepare(self, num_pages: int) -> None:
        model = self._target
        assert isinstance(model, Decoder), "a head reads the decoder that most families share"
        super().prepare(num_pages)
        if not num_pages:
            return
        width = self._head.shape.hidden_size
        pool = KVPool(
            num_layers=1,
            num_pages=num_pages,
            page_size=self._config.kv.page_size,
            num_kv_heads=1,
            head_size=width,
            dtype=self._dtype,
            device=self._device,
            latent_size=width,
        )
        self._states = KeptStates(self._head, pool, self._head.shape.state_layers_of(len(model.layers)))
        self._head.model, self._head.states, model.tap = model, self._states, self._states
        self.kept_pools = (pool,)

    def drafter(self, rows: DeviceRows, vocab_size: int) -> HeadDrafter:
        assert self._own is not None, "the head has no pool"
        assert self._states is not None, "the model keeps no states"
        return HeadDrafter(
            self._head,
            *self._own,
            rows,
            states=self._states,
            to_model_V=self._to_model_V,
            num_tokens=self._draft.num_tokens,
            most_tokens=self._config.scheduler.prefill_chunk,
        )


def _to_model(directory: Path, shape: EagleHeadShape, device: torch.device) -> Tensor | None:
    """Return int64[V], the model's token of each of the head's; None if they are the same.  The file has distances.

    Raises WeightsError with the fault of the file."""
    stored, size = read_shards(directory), shape.draft_vocab_size
    if TO_MODEL not in stored:
        if size == shape.vocab_size:
            return None
        what = f"tensor {TO_MODEL!r} is missing from the weights: the head has {size} of {shape.vocab_size} tokens"
        raise WeightsError(f"{directory}: {what}")
    reader = SafetensorsReader(stored)
    distances_V = reader.whole(TO_MODEL)
    reader.close()
    where = f"{stored[TO_MODEL].file}: tensor {TO_MODEL!r}"
    if distances_V.shape != (size,) or distances_V.is_floating_point():
        seen = f"{list(distances_V.shape)} of {str(distances_V.dtype).removeprefix('torch.')}"
        raise WeightsError(f"{where} is {seen}, expected [{size}] of integers")
    tokens_V = torch.arange(size) + distances_V.long()
    if not bool(((tokens_V >= 0) & (tokens_V < shape.vocab_size)).all()):
        raise WeightsError(f"{where} leads beyond the model's tokens, which are 0 to {shape.vocab_size - 1}")
    return tokens_V.to(device)
