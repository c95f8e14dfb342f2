"""The optional parts of a rank: the hooks that they may have, and the context from which they are built.

Owns: the hooks of a feature.  Does not know: which features there are (``engine/startup/features.py`` finds them).
A feature lies in a folder of ``engine/features``; its module ``rank`` has a function ``rank_feature``, which returns
the feature of one rank, or None if the configuration does not use it.  The runner looks the hooks of steps up once,
when it is built: a hook that no feature overrides costs nothing.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from engine.actors.runner import Answer
from engine.checkpoints.checkpoint import ModelSpec
from engine.config import Config
from engine.execution.captured_steps import CapturedDecodes
from engine.execution.launched_step import LaunchedStep
from engine.execution.needs import Needs
from engine.execution.prompts import PromptReader
from engine.execution.rows import DeviceRows
from engine.layers.attention import AttentionBackend
from engine.layers.comm import Comm
from engine.layers.kv_pool import KVPool
from engine.layers.states import RecurrentStates
from engine.messages import FeatureRequest, Step
from engine.models.model import Model
from engine.plugins.manager import Plugins

if TYPE_CHECKING:
    from engine.graphs.rank import RankGraphs


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """A rank whose weights are loaded, for the features that are built next.

    max_len: tokens of the longest row.
    place: equal on ranks that share memory, as in ``fair_share``.
    model, rows: the rank's own.  states: of recurrent layers, one slot for each row; None for a model without them.
    reload: loads another checkpoint of the same shape as the model was loaded; it calls no other rank.
    given: facts that features need and the engine has found, msgpack by the feature's name.
    graphs: of the rank.
    features: all of the rank, once they are built."""

    config: Config
    spec: ModelSpec
    max_len: int
    plugins: Plugins
    comm: Comm
    device: torch.device
    dtype: torch.dtype
    place: int
    progress: bool
    model: Model
    rows: DeviceRows
    states: RecurrentStates | None
    reload: Callable[[ModelSpec], Model]
    given: Mapping[str, bytes]
    graphs: "RankGraphs"
    features: list["RankFeature"] = field(default_factory=list)


class RankFeature:
    """An optional part of one rank.  A subclass overrides the hooks that it needs.

    order: features of lower order come first.
    more_samples: positions of one row that are sampled in a step, in addition to its last one.
    page_bytes: memory that the feature takes for each page of the KV pool.
    reader: reads the states of prompts; None for none.
    pools: pools with as many pages as the KV pool, whose pages move between the tiers with those of the KV pool."""

    order = 0
    more_samples = 0
    page_bytes = 0
    reader: PromptReader | None = None
    pools: tuple[KVPool, ...] = ()

    # ---- while the rank is loaded -----------------------------------------------------------

    def needs(self, needs: Needs) -> Needs:
        """Return the memory that must stay free next to the pool, including this feature's."""
        return needs

    def prepare(self, num_pages: int) -> None:
        """Allocate what goes with a KV pool of so many pages, in place of the memory of the call before.

        For 0, free it."""

    def attention(self, backend: AttentionBackend) -> AttentionBackend:
        """Return the attention backend, or one in its place."""
        return backend

    def graph_bytes(self) -> int:
        """Return the bytes of graphs that ``build`` will capture, by trial captures over the memory of ``prepare``."""
        return 0

    def build(self, pool: KVPool, pools: Sequence[KVPool], needs: Needs) -> None:
        """Build the rest.  pool: the KV pool of the model.  pools: all features' ``pools``.  needs: of the device."""

    def around(self, model: Any) -> Any:
        """Return the model, or one in its place; also called with captures of the model."""
        return model

    def models(self) -> Mapping[str, Model]:
        """Return further models whose steps are captured next to those of the rank's own, by name."""
        return {}

    def decodes(self, whole: CapturedDecodes) -> CapturedDecodes:
        """Return the object that runs whole decode steps, or one in its place."""
        return whole

    # ---- steps ------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Prepare for the next step.  Pages still hold the content that the steps before it have left."""

    def apply(self, step: Step) -> Step:
        """Take in the changes of a step.  Return the step as the rest of the rank gets it."""
        return step

    def launched(self, step: Step, launched: LaunchedStep) -> None:
        """Add to the result of a step that is launched, by ``LaunchedStep.parts``."""

    # ---- next to the steps ------------------------------------------------------------------

    def receive(self, message: FeatureRequest, answer: Answer) -> bool:
        """Take a message, and return True; False if it is another feature's.

        It is called on the event loop, and returns at once.  answer: sends messages to the scheduler, on any thread."""
        return False

    def with_weights(self, spec: ModelSpec) -> Callable[[], None] | None:
        """Read what goes with other weights of the model, next to the steps, also after ``without_weights``.

        Return the function that puts it in place between two steps; None if nothing changes.  Raises WeightsError."""
        return None

    def without_weights(self) -> None:
        """Free weights that the feature has: no step follows until there are others."""

    def page_memory(self) -> Sequence[torch.Tensor]:
        """Return memory whose content is lost with that of all pages, beside ``pools``."""
        return ()

    def close(self) -> None:
        """Finish the work next to the steps, within limits; no step follows."""

    def leave(self) -> None:
        """Begin to end the work next to the steps, without a wait: the rank has failed."""


def hooks(features: Iterable[RankFeature], name: str) -> tuple[Callable[..., Any], ...]:
    """Return the methods of this name that features have overridden."""
    return tuple(getattr(one, name) for one in features if getattr(type(one), name) is not getattr(RankFeature, name))
