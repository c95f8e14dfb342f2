"""Weight updates on a rank: weights that are read next to the present ones, and take their place between two steps.

Owns: the second set of weights, and which ones the rank has.
Does not know: when weights change, how a model is loaded.

The new weights are loaded and laid out as at the start, so a step has the bits of an engine that was started with
them.  Then the model takes over the other one's parts: nothing is copied, and the old weights are freed.
"""

import ctypes
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from engine.actors.runner import Answer
from engine.checkpoints.checkpoint import ModelSpec
from engine.checkpoints.fingerprint import fingerprint
from engine.execution.captured_steps import CapturedDecodes
from engine.execution.compiled_decodes import CompiledDecodes
from engine.execution.device import choose_dtype
from engine.execution.features import RankContext, RankFeature
from engine.execution.needs import Needs
from engine.features.weight_updates.files import check_same_model
from engine.features.weight_updates.messages import (
    NAME,
    Drop,
    FreeMemory,
    LoadWeights,
    Request,
    Switch,
    Tag,
    Weights,
    answer_to,
    request_of,
)
from engine.host.memory import release_freed
from engine.layers.kv_pool import KVPool
from engine.layers.linear import PlainWeight
from engine.layers.packing import WrappedWeight
from engine.messages import FeatureRequest
from engine.models.decoder import Decoder
from engine.models.model import Model, build_model
from engine.plugins.families import read_model
from engine.plugins.weight_type import with_weight_type
from engine.text.pictures import NAME as PICTURES
from engine.types.errors import CallboardError, WeightsError

log = logging.getLogger(__name__)

KEPT = ("tap",)  # attributes of a model that others have set
MADV_DONTNEED = 4  # the system takes the memory, which has zeros when it is touched again


class WeightsRank(RankFeature):
    """The weights of one rank."""

    order = -10  # before features that put something in the place of the compiled decode steps

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._sinks = context.model.attention_spec.sinks
        self._present = self._read = Weights()
        self._next: Model | None = None
        self._followers: list[Callable[[], None]] = []
        self._whole: CapturedDecodes | None = None
        self._num_models = 0
        self._has_weights = True
        self._pools: tuple[KVPool, ...] = ()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")

    def around(self, model: object) -> object:
        """Count the objects that run the model: a second one is captured, and reads the first weights' memory."""
        self._num_models += 1
        return model

    def decodes(self, whole: CapturedDecodes) -> CapturedDecodes:
        """Note the object that runs decode steps, and reads the weights' memory."""
        self._whole = whole
        return whole

    def build(self, pool: KVPool, pools: Sequence[KVPool], needs: Needs) -> None:
        """Note the pools, whose memory may be given back."""
        self._pools = (pool, *pools)

    # ---- next to the steps ------------------------------------------------------------------

    def receive(self, message: FeatureRequest, answer: Answer) -> bool:
        """Read weights, or change to them, on a thread."""
        if message.feature != NAME:
            return False
        self._thread.submit(self._do, message, answer)
        return True

    def _do(self, message: FeatureRequest, answer: Answer) -> None:
        error = ""
        try:
            self._follow(request_of(message))
        except CallboardError as refusal:
            error = str(refusal)
        except Exception as fault:
            log.exception("weights cannot be changed")
            error = f"{type(fault).__name__}: {fault}"
        answer(answer_to(message, self._context.comm.rank, error))

    def _follow(self, request: Request) -> None:
        match request:
            case LoadWeights(weights):
                self._drop()
                self._next = self._load(weights)
                self._read = weights
            case Switch(number):
                if number != self._read.number:
                    raise WeightsError(f"weights {number} have not been read, but {self._read.number}")
                if self._next is not None:
                    self._take_over(self._next)
                for follow in self._followers:
                    follow()
                self._present, self._next, self._followers, self._has_weights = self._read, None, [], True
            case Drop():
                self._drop()
            case FreeMemory(tags):
                self._free(*tags)

    def _drop(self) -> None:
        self._read, self._next, self._followers = Weights(), None, []

    def _free(self, *tags: Tag) -> None:
        """Give memory back to the system.  Raises WeightsError if it stays."""
        context = self._context
        if context.device.type != "cpu":
            raise WeightsError("on a GPU executors give back all of their memory at once: POST /sleep?level=2")
        if "weights" in tags and self._has_weights:
            self._check_fixed()
            model = build_model(context.spec.shape, context.comm, torch.device("meta"), context.dtype)
            self._take_over(model, describes=False)
            for feature in context.features:
                feature.without_weights()
            self._has_weights = False
        if "kv_cache" in tags:
            states = () if context.states is None else (context.states.data,)
            of_features = (memory for feature in context.features for memory in feature.page_memory())
            for memory in (*(pool.by_page for pool in self._pools), *states, *of_features):
                _give_back(memory)
        release_freed()

    def _load(self, weights: Weights) -> Model | None:
        """Return a model with the weights; None if the present one has them."""
        context = self._context
        is_present = weights.number == self._present.number or not (weights.directory or self._present.directory)
        if is_present and self._has_weights:
            return None
        self._check_fixed()
        config = context.config
        spec = context.spec
        if weights.directory:
            _, spec = with_weight_type(config, read_model(Path(weights.directory), config.plugins, config.model))
        check_same_model(context.spec, spec, config.model.load_format)
        self._check_files(spec, weights)
        if (dtype := choose_dtype(config.model.dtype, context.device, spec.dtype)) != context.dtype:
            raise WeightsError(
                f"{spec.directory}: a start computes it in {dtype}, not {context.dtype}; set model.dtype"
            )
        model = context.reload(spec)
        others = (feature.with_weights(spec) for feature in context.features)
        self._followers = [one for one in others if one is not None]
        self._check_files(spec, weights)  # again: they may have changed while they were read
        self._check_sinks(model)
        return model

    def _check_fixed(self) -> None:
        """Raise WeightsError for a model whose weights have a fixed place."""
        if self._num_models > 1 or not isinstance(self._whole, CompiledDecodes | None):
            raise WeightsError("captured steps read the weights' memory; set graphs.mode = 'off' to change weights")
        if PICTURES in self._context.given:
            raise WeightsError("a model with an encoder of pictures keeps the weights that it was started with")

    def _check_files(self, spec: ModelSpec, weights: Weights) -> None:
        """Raise WeightsError unless the files have the digest of the weights."""
        if weights.digest and fingerprint(spec, self._context.config.model.load_format) != weights.digest:
            raise WeightsError(
                f"{weights.directory}: its files have changed since version {weights.version} was checked"
            )

    def _check_sinks(self, model: Model) -> None:
        """Raise WeightsError for other sinks: the attention backend has copies of them."""
        pairs = zip(self._sinks, model.attention_spec.sinks, strict=True)
        if not all(torch.equal(one, other) for one, other in pairs):
            raise WeightsError("the sinks of attention differ, which only a restart changes")

    @torch.inference_mode()
    def _take_over(self, other: Model, *, describes: bool = True) -> None:
        model = self._context.model
        if isinstance(model, Decoder) and isinstance(other, Decoder):
            for layer, new in zip(model.layers, other.layers, strict=True):
                for linear, plain in zip(layer.linears, new.linears, strict=True):
                    if isinstance(wrapped := linear.packed, WrappedWeight):
                        wrapped.plain = plain.packed or PlainWeight(plain.weight)
                        plain.packed = wrapped
        vars(model).update({name: value for name, value in vars(other).items() if name not in KEPT})
        if isinstance(self._whole, CompiledDecodes) and describes:
            self._whole.describe()

    def close(self) -> None:
        """Wait for the thread."""
        self._drop()
        self._thread.shutdown(cancel_futures=True)

    def leave(self) -> None:
        """Let the thread end."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _give_back(memory: torch.Tensor) -> None:
    """Let the system have the whole pages of a tensor's memory."""
    storage, size = memory.untyped_storage(), mmap.PAGESIZE
    begin = -(-storage.data_ptr() // size) * size
    length = (storage.data_ptr() + storage.nbytes()) // size * size - begin
    if length > 0:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes, madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
        if madvise(begin, length, MADV_DONTNEED):
            raise WeightsError(f"the memory of pages stays: {os.strerror(ctypes.get_errno())}")


def rank_feature(context: RankContext) -> WeightsRank:
    """Return the feature."""
    return WeightsRank(context)
