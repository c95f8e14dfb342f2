"""A rank's draft model: its weights, attention and pool beside those of the model that it drafts for.

Owns: how they are put together, what they take of the rank's memory.  Does not know: steps, why it was chosen.
"""

from dataclasses import replace
from pathlib import Path

import torch
from msgspec import structs

from engine.checkpoints.checkpoint import ModelSpec
from engine.config import Config
from engine.execution.attention import RankAttention
from engine.execution.device import fair_share, free_bytes
from engine.execution.drafting import Drafter
from engine.execution.rows import DeviceRows
from engine.layers.attention import AttentionBackend
from engine.layers.comm import Comm
from engine.layers.kv_pool import KVPool
from engine.models.loader import load_model
from engine.models.model import Model, build_model
from engine.plugins.families import read_model
from engine.plugins.manager import Plugins
from engine.plugins.support.paging import new_pool, page_bytes
from engine.scheduling.proposer import DraftModel
from engine.startup.linears import choose_linears
from engine.startup.memory import Needs, check_weights, host_needs
from engine.types.errors import ConfigError


class RankDraft:
    """Loaded; without a pool until ``drafter``.  page_bytes: of its pool.  place: as ``fair_share`` has it.

    Raises ConfigError, WeightsError, PluginError, as for the model itself."""

    def __init__(
        self,
        draft: DraftModel,
        config: Config,
        plugins: Plugins,
        comm: Comm,
        *,
        device: torch.device,
        dtype: torch.dtype,
        place: int,
        progress: bool,
    ) -> None:
        section = structs.replace(config.model, path=draft.path, numerics="fast", experts="cut")
        self._config = config = structs.replace(config, model=section)
        self._draft = draft
        self._spec = self._read_spec(Path(draft.path))
        self._device, self._dtype = device, dtype
        room = fair_share(free_bytes(device), place, comm, device)
        try:
            plan = build_model(self._spec.shape, comm, torch.device("meta"), dtype)
        except ConfigError as error:
            raise ConfigError(f"the draft model {draft.path}: {error}") from None
        self.model = load_model(
            self._spec,
            comm,
            device,
            dtype,
            load_format=section.load_format,
            seed=config.device.seed,
            progress=progress,
            linears=choose_linears(config, self._spec, plugins, plan, device),
            check_room=lambda needed: check_weights(self._spec, needed, dtype, room, comm.size),
        )
        self._kv_dtype = config.kv.kept_as(str(dtype).removeprefix("torch."))
        spec, kv = self.model.attention_spec, config.kv
        self._attention = RankAttention(plugins, spec, kv.page_size, device, dtype, kv.layout, self._kv_dtype)
        self.page_bytes = page_bytes(spec, kv.page_size, dtype, self._kv_dtype)

    def _read_spec(self, directory: Path) -> ModelSpec:
        return read_model(directory, self._config.plugins, self._config.model)

    def needs(self, model: Needs, max_len: int) -> Needs:
        """What must stay free for both; one's step begins when the other's pass has ended.  model: for that alone.

        On a GPU passes are no larger than the model's steps, whose memory they find free."""
        if self._device.type != "cpu":
            return model
        own = host_needs(self._config, self._spec.shape, max_len, self._dtype)
        return replace(
            model,
            activation_bytes=max(model.activation_bytes, own.activation_bytes),
            product_bytes=model.product_bytes + own.product_bytes,
        )

    def attention(self, num_pages: int) -> AttentionBackend:
        """Its attention over a pool of so many pages."""
        return self._attention.build(self._pool(num_pages))

    def tap(self, model: Model, num_pages: int) -> None:
        """Before each pool that the model gets: have it keep what drafting reads of it, which is nothing."""

    def drafter(self, num_pages: int, rows: DeviceRows, vocab_size: int) -> Drafter:
        """With a pool of as many pages.  rows, vocab_size: of the model."""
        pool = self._pool(num_pages)
        return Drafter(
            self.model,
            pool,
            self._attention.build(pool),
            rows,
            vocab_size=min(vocab_size, self.model.vocab_size),
            num_tokens=self._draft.num_tokens,
            most_tokens=self._config.scheduler.prefill_chunk,
        )

    def _pool(self, num_pages: int) -> KVPool:
        spec, kv = self.model.attention_spec, self._config.kv
        return new_pool(spec, num_pages, kv.page_size, self._dtype, self._device, kv.layout, self._kv_dtype)
