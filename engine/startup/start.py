"""The start of one rank: the configuration, the model's shape, the device and the other ranks.

Owns: the facts, and what follows from them alone.  Does not know: weights, pools, steps.
"""

from dataclasses import dataclass

import torch

from engine.checkpoints.checkpoint import ModelSpec
from engine.config import Config
from engine.graphs.rank import RankGraphs
from engine.host.stages import Stages
from engine.layers.comm import Comm
from engine.plugins.manager import Plugins


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The facts from which a rank is loaded.

    place: equal on ranks that share memory, as in ``fair_share``.  stages: of the start."""

    config: Config
    spec: ModelSpec
    max_len: int
    plugins: Plugins
    comm: Comm
    device: torch.device
    dtype: torch.dtype
    graphs: RankGraphs
    place: int
    progress: bool
    stages: Stages

    @property
    def on_cpu(self) -> bool:
        """Whether the rank computes on a CPU."""
        return self.device.type == "cpu"

    @property
    def invariant(self) -> bool:
        """Whether a token has the same bits whatever else is in its step."""
        return self.config.model.numerics == "invariant"

    @property
    def kv_dtype(self) -> str:
        """The type of numbers in pages, "" for the model's own."""
        return self.config.kv.kept_as(str(self.dtype).removeprefix("torch."))
