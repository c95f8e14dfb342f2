"""A rank's draft model: its weights, attention and pool next to those of the model that it drafts for.

Owns: how they are put together, how much of the rank's memory they take.  Does not know: steps, why it was chosen.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from msgspec import structs
from torch import Tensor

from engine.checkpoints.checkpoint import ModelSpec
from engine.checkpoints.quantization import MXFP4
from engine.execution.attention import RankAttention
from engine.execution.device import fair_share, free_bytes
from engine.execution.features import RankContext
from engine.execution.needs import Needs
from engine.execution.rows import DeviceRows
from engine.features.speculation.drafting import Drafter
from engine.layers.attention import AttentionBackend
from engine.layers.comm import is_capturable
from engine.layers.kv_pool import KVPool
from engine.models.loader import load_model
from engine.models.model import Model, build_model
from engine.plugins.families import read_model
from engine.plugins.support.paging import new_pool, page_bytes
from engine.plugins.weight_type import with_weight_type
from engine.scheduling.proposer import DraftModel
from engine.startup.linears import choose_linears
from engine.startup.memory import check_weights, host_needs
from engine.types.errors import ConfigError


class RankDraft:
    """A draft model with its weights, and with a pool once ``prepare`` was called.

    page_bytes: memory of a page of that pool.
    kept_pools: pools of the model's data that the draft reads.

    Raises ConfigError, WeightsError, PluginError, as for the model itself."""

    def __init__(self, draft: DraftModel, context: RankContext) -> None:
        comm, device, dtype, plugins = context.comm, context.device, context.dtype, context.plugins
        section = structs.replace(context.config.model, path=draft.path, numerics="fast", experts="cut")
        if section.quantization == "fp8":  # a small model takes longer in float8
            section = structs.replace(section, quantization="none")
        elif section.quantization == MXFP4:  # the draft's checkpoint may have other weights
            section = structs.replace(section, quantization="auto")
        self._config = structs.replace(context.config, model=section)
        self._target = context.model
        self._draft = draft
        self._config, self._spec = with_weight_type(self._config, self._read_spec(Path(draft.path)))
        config, section = self._config, self._config.model
        self._device, self._dtype = device, dtype
        self._comm, self._place = comm, context.place
        self._graphs, self._progress = context.graphs, context.progress
        try:
            plan = build_model(self._spec.shape, comm, torch.device("meta"), dtype)
        except ConfigError as error:
            raise ConfigError(f"the draft model {draft.path}: {error}") from None
        self._linears = choose_linears(config, self._spec, plugins, plan, device)
        self.model = self._load(self._spec, progress=context.progress)
        self._has_weights = True
        self._kv_dtype = config.kv.kept_as(str(dtype).removeprefix("torch."))
        spec, kv = self.model.attention_spec, config.kv
        self._attention = RankAttention(plugins, spec, kv.page_size, device, dtype, kv.layout, self._kv_dtype)
        self.page_bytes = page_bytes(spec, kv.page_size, dtype, self._kv_dtype)
        self.kept_pools: tuple[KVPool, ...] = ()
        self._own: tuple[KVPool, AttentionBackend] | None = None

    def _read_spec(self, directory: Path) -> ModelSpec:
        return read_model(directory, self._config.plugins, self._config.model)

    def _load(self, spec: ModelSpec, *, progress: bool = False) -> Model:
        device, dtype, comm, section = self._device, self._dtype, self._comm, self._config.model
        room = fair_share(free_bytes(device), self._place, comm, device)
        return load_model(
            spec,
            comm,
            device,
            dtype,
            load_format=section.load_format,
            seed=self._config.device.seed,
            progress=progress,
            linears=self._linears,
            check_room=lambda needed: check_weights(spec, needed, dtype, room, comm.size),
        )

    def with_weights(self, target: ModelSpec) -> Callable[[], None] | None:
        """Read the weights that go with others of the model: its own layer, or what was freed; None for nothing.

        Return the function that puts them in the place of the present ones."""
        directory = self._directory(target)
        if directory is None:
            return None
        _, spec = with_weight_type(self._config, self._read_spec(directory))
        return partial(self._take_over, self._load(spec), has_weights=True)

    def _directory(self, target: ModelSpec) -> Path | None:
        """Return the checkpoint to read beside other weights of the model; None for none."""
        return None if self._has_weights else Path(self._draft.path)

    def without_weights(self) -> None:
        """Free the weights."""
        empty = build_model(self._spec.shape, self._comm, torch.device("meta"), self._dtype)
        self._take_over(empty, has_weights=False)

    def _take_over(self, other: Model, *, has_weights: bool) -> None:
        vars(self.model).update(vars(other))  # what others have set of it stays
        self._has_weights = has_weights

    def page_memory(self) -> tuple[Tensor, ...]:
        """Return the memory of its own pool."""
        return () if self._own is None else (self._own[0].by_page,)

    def needs(self, model: Needs, max_len: int) -> Needs:
        """Return what must stay free for both models, of which one computes at a time.  model: the model's own needs.

        On a GPU the draft's passes are no larger than the model's steps, and use the same free memory."""
        if self._device.type != "cpu":
            return model
        own = host_needs(self._config, self._spec.shape, max_len, self._dtype)
        return replace(
            model,
            activation_bytes=max(model.activation_bytes, own.activation_bytes),
            product_bytes=model.product_bytes + own.product_bytes,
        )

    def prepare(self, num_pages: int) -> None:
        """Allocate a pool of so many pages, and attention over it; for 0, free the present ones."""
        self._own = None
        if num_pages:
            spec, kv = self.model.attention_spec, self._config.kv
            pool = new_pool(spec, num_pages, kv.page_size, self._dtype, self._device, kv.layout, self._kv_dtype)
            self._own = pool, self._attention.build(pool)

    def capture(self, drafter: Drafter) -> None:
        """Capture the passes of a drafter."""
        if not self._captures:
            return
        drafter.capture(self._graphs, self._own_attention, self._config.scheduler.max_running, self._progress)

    def graph_bytes(self, drafter: Drafter) -> int:
        """Return the bytes that ``capture`` will take."""
        if not self._captures:
            return 0
        return drafter.graph_bytes(self._graphs, self._own_attention, self._config.scheduler.max_running)

    @property
    def _captures(self) -> bool:
        """Whether its passes can be graphs.

        Sums of several ranks must be part of them: outside, they would leave out rows behind padding, of which the
        first pass has some between rows."""
        return self._own is not None and (self._comm.size == 1 or is_capturable(self._comm))

    def _own_attention(self) -> AttentionBackend:
        assert self._own is not None, "the draft model has no pool"
        return self._attention.build(self._own[0])

    def drafter(self, rows: DeviceRows, vocab_size: int) -> Drafter:
        """Return a drafter that uses the pool.  rows, vocab_size: those of the model."""
        assert self._own is not None, "the draft model has no pool"
        return Drafter(
            self.model,
            *self._own,
            rows,
            vocab_size=min(vocab_size, self.model.vocab_size),
            num_tokens=self._draft.num_tokens,
            most_tokens=self._config.scheduler.prefill_chunk,
        )
