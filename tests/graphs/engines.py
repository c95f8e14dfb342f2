"""Whole engines and runners whose graphs are recorded by the double: what captures on this CPU is put in its place."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from engine.execution.attention import RankAttention
from engine.graphs import rank
from tests.graphs.recording import RecordingDevice
from tests.graphs.resident import ResidentTorchAttention


class EngineDevice(RecordingDevice):
    """Every tensor that is there when captures begin is static: weights, rows, the pool."""

    @contextmanager
    def stream(self) -> Iterator[None]:
        for one in gc.get_objects():
            # No traced ones; and isinstance would wake lazy objects.  What is static is so by its first tensor: a view
            # of it that is there by chance may be gone soon.
            if type(one) in (Tensor, torch.nn.Parameter) and not self.is_static(one):
                self.register(one)
        with super().stream():
            yield


def install(monkeypatch: pytest.MonkeyPatch, resident: bool = True) -> list[EngineDevice]:
    """Engines that are built from here on capture; their devices are in the list.

    resident: attention without a plan."""
    devices: list[EngineDevice] = []

    def device_for_graphs(device: torch.device) -> EngineDevice:
        devices.append(EngineDevice(descending=False))
        return devices[-1]

    monkeypatch.setattr(rank, "device_for_graphs", device_for_graphs)
    monkeypatch.setattr("engine.kernels.panels.compiled", lambda: None)  # nobody records what is not torch's
    if resident:
        monkeypatch.setattr(RankAttention, "build", lambda self, pool: ResidentTorchAttention(self._spec, pool))
    return devices
