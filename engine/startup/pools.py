"""The KV pool of a rank: how many pages it has, and the parts that are built over it.

Owns: the order in which memory is measured and taken.  Does not know: how weights are loaded, how a step runs.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.execution.attention import RankAttention
from engine.execution.device import fair_share, free_bytes
from engine.execution.features import RankFeature
from engine.execution.needs import Needs
from engine.execution.rows import DeviceRows
from engine.graphs.rank import StepParts
from engine.layers.comm import Comm
from engine.layers.states import RecurrentStates
from engine.models.model import Model
from engine.plugins.support.paging import new_pool, page_bytes
from engine.sampling.sampler import Sampler
from engine.startup.memory import (
    MAX_CPU_POOL_BYTES,
    MAX_HOST_SHARE,
    host_needs,
    pool_pages,
    require_room,
    run_largest_step,
)
from engine.startup.model_steps import ModelSteps
from engine.startup.start import Start
from engine.types.errors import ConfigError


class PoolMaker:
    """A maker of a rank's KV pool and the parts that read it.  It also finds the number of pages.

    needs: memory that must stay free next to the pool, set by ``parts``."""

    def __init__(
        self,
        start: Start,
        model: Model,
        attention: RankAttention,
        rows: DeviceRows,
        sampler: Sampler,
        states: RecurrentStates | None,
        features: Sequence[RankFeature],
    ) -> None:
        self.needs = Needs()
        self._start = start
        self._model = model
        self._attention = attention
        self._rows = rows
        self._sampler = sampler
        self._states = states
        self._features = features
        self._more_samples = max((one.more_samples for one in features), default=0)

    def parts(self, known_pages: int) -> StepParts:
        """Return the parts that the rank runs its steps with.  known_pages: the pages it must have; 0 to find out.

        Raises ConfigError if there is no memory for them."""
        num_pages = self._num_pages(known_pages)
        try:
            return self._make(num_pages)
        except (MemoryError, torch.OutOfMemoryError) as error:
            asked = f"{num_pages * self._page_bytes / 1e9:.1f} GB for a KV pool of {num_pages} pages"
            raise ConfigError(f"no room for {asked} ({error}); lower kv.num_pages or kv.memory_fraction") from None

    def _make(self, num_pages: int) -> StepParts:
        start, kv, spec = self._start, self._start.config.kv, self._model.attention_spec
        pool = new_pool(spec, num_pages, kv.page_size, start.dtype, start.device, kv.layout, start.kv_dtype)
        for feature in self._features:
            feature.prepare(num_pages)
        backend = self._attention.build(pool)
        for feature in self._features:
            backend = feature.attention(backend)
        # Only now: the plugins that 'auto' has chosen are loaded by this time.
        start.graphs.break_at([name for one in start.plugins.declarations.values() for name in one.graph_breaks])
        others = {name: model for feature in self._features for name, model in feature.models().items()}
        samples = 1 + self._more_samples
        return StepParts(self._model, pool, backend, self._rows, self._sampler, self._states, others, samples)

    @property
    def _page_bytes(self) -> int:
        own = page_bytes(
            self._model.attention_spec, self._start.config.kv.page_size, self._start.dtype, self._start.kv_dtype
        )
        return own + sum(feature.page_bytes for feature in self._features)

    def _num_pages(self, known_pages: int) -> int:
        start, config = self._start, self._start.config
        on_cpu, bytes_of_page = start.on_cpu, self._page_bytes
        num_pages = known_pages or config.kv.num_pages
        needs = Needs()
        if on_cpu:
            needs = host_needs(config, start.spec.shape, start.max_len, start.dtype, self._more_samples)
            if self._states is not None:  # the system gives the memory when it is written
                needs = replace(needs, feature_bytes=(("recurrent states", self._states.data.nbytes),))
        if not num_pages and start.graphs.device.captures:
            needs = self._measured_needs()
        start.graphs.device.trim()
        for feature in self._features:
            needs = feature.needs(needs)
        self.needs = needs
        room = fair_share(free_bytes(start.device), start.place, start.comm, start.device)
        if not num_pages:
            room = min(room, MAX_CPU_POOL_BYTES + needs.total) if on_cpu else room
            return _smallest(pool_pages(config, start.max_len, bytes_of_page, room, needs), start.comm, start.device)
        if not known_pages:  # else it has fitted before, and the user may not have set the number
            asked = f"kv.num_pages={num_pages}: {num_pages * bytes_of_page / 1e9:.1f} GB of memory"
            require_room(asked, num_pages, bytes_of_page, room, MAX_HOST_SHARE if on_cpu else 1.0, needs)
        return num_pages

    def _measured_needs(self) -> Needs:
        """Measure with a pool that is freed again.  Raises ConfigError if the largest step itself does not fit."""
        device, config, max_len = self._start.graphs.device, self._start.config, self._start.max_len
        free = device.memory().free_bytes
        parts = self._make(1)
        device.trim()
        attention_bytes = max(0, free - device.memory().free_bytes)
        steps = ModelSteps(parts)
        try:
            activation_bytes = device.peak(lambda: run_largest_step(config, max_len, steps, self._more_samples))
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"scheduler.max_step_tokens={config.scheduler.max_step_tokens}: no room for a step of that size "
                f"next to the weights ({error}); lower it, or scheduler.max_running"
            ) from None
        device.trim()
        others = [feature.graph_bytes for feature in self._features]
        graph_bytes = self._start.graphs.measure(parts, config.scheduler, others)
        for feature in self._features:
            feature.prepare(0)
        return Needs(activation_bytes, graph_bytes, attention_bytes=attention_bytes)


def _smallest(number: int, comm: Comm, device: torch.device) -> int:
    """Return the smallest of all ranks' numbers: one scheduler plans for all of them."""
    if comm.size == 1:
        return number
    return int(comm.all_gather(torch.tensor([number], device=device), 0).min())
