"""Adapters on a rank: slots next to the weights, and the model that steps with an adapter run.

Owns: when slots are filled, and which model a step runs.  Does not know: what the products compute, files.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import msgspec

from engine.actors.runner import Answer
from engine.execution.captured_steps import CapturedDecodes
from engine.execution.features import RankContext, RankFeature
from engine.execution.launched_step import LaunchedStep
from engine.execution.needs import Needs
from engine.features.lora.adapters import AdaptedDecodes, AdaptedModel, CapturedAdapters, RankAdapters
from engine.features.lora.files import NAME
from engine.features.lora.messages import AdapterRead, ReadAdapter
from engine.features.lora.settings import LoraSettings
from engine.messages import FeatureRequest, Step
from engine.models.decoder import Decoder
from engine.models.model import Model
from engine.types.errors import ConfigError


class LoraRank(RankFeature):
    """The adapters of one rank.  on_cpu: the slots take their memory when they are filled."""

    order = 20

    def __init__(self, decoder: Decoder, adapters: RankAdapters, rank: int, *, on_cpu: bool) -> None:
        self._rank = rank
        self._decoder = decoder
        self._adapters = adapters
        self._on_cpu = on_cpu
        self._lost: dict[int, str] = {}

    def needs(self, needs: Needs) -> Needs:
        """Return the needs with those of all slots."""
        if not self._on_cpu:
            return needs
        return replace(needs, feature_bytes=(*needs.feature_bytes, ("adapters", self._adapters.nbytes)))

    def around(self, model: Any) -> Any:
        """Return a model that steps with adapters can use."""
        return AdaptedModel(self._decoder, model, self._adapters)

    def models(self) -> Mapping[str, Model]:
        """Return the model with adapters, for decode steps."""
        return {NAME: cast("Model", CapturedAdapters(self._decoder, self._adapters))}

    def decodes(self, whole: CapturedDecodes) -> CapturedDecodes:
        """Return decode steps that know which of them have an adapter."""
        return AdaptedDecodes(whole, self._adapters)

    def apply(self, step: Step) -> Step:
        """Fill slots, and note which rows of the step read one."""
        self._lost = self._adapters.take(step)
        return step

    def launched(self, step: Step, launched: LaunchedStep) -> None:
        """Add to the result the reasons why rows got no adapter."""
        if lost := self._lost:
            launched.parts[NAME] = partial(msgspec.msgpack.encode, lost)

    def receive(self, message: FeatureRequest, answer: Answer) -> bool:
        """Begin to read an adapter, or drop what was read."""
        if message.feature != NAME:
            return False
        wanted, reader = ReadAdapter.of(message), self._adapters.reader
        if wanted.drop:
            reader.drop(wanted.adapter)
        else:
            reader.begin(wanted.adapter, lambda reason: answer(AdapterRead(reason).message(self._rank, message.number)))
        return True

    def close(self) -> None:
        self._adapters.reader.leave()

    def leave(self) -> None:
        self._adapters.reader.leave()


def rank_feature(context: RankContext) -> LoraRank | None:
    """Return slots for adapters, or None if none are served.  Raises ConfigError if there is no memory for them."""
    lora, model = LoraSettings.of(context.config), context.model
    if not lora.folder:
        return None
    assert isinstance(model, Decoder), f"{type(model).__name__} takes no adapters"
    scheduler = context.config.scheduler
    sizes = lora.max_adapters, lora.max_rank, scheduler.max_running, scheduler.max_step_tokens
    try:
        adapters = RankAdapters(model, context.comm, *sizes)
    except (MemoryError, RuntimeError) as error:  # torch raises these when it cannot allocate, on every device
        raise ConfigError(
            f"lora.max_adapters={lora.max_adapters}, lora.max_rank={lora.max_rank}: no memory ({error}); lower them"
        ) from None
    return LoraRank(model, adapters, context.comm.rank, on_cpu=context.device.type == "cpu")
