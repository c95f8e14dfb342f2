"""Stands in for the triton backend's kernels: what would be launched is written down.

Owns: the record.  Does not know: what a kernel computes.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.plugins.attention.triton import backend, prefix
from engine.plugins.attention.triton.tiles import GpuProcessors

KERNELS = ("decode_attention", "merge_parts", "prefill_attention")
SHARED_KERNELS = ("compare_rows", "choose_rows", "shared_attention")  # of rows that share pages
H200 = GpuProcessors("NVIDIA H200", count=132, shared_bytes=227 << 10)


@dataclass(frozen=True)
class Launch:
    """tensors: all that were passed; numbers: all else that was passed by position."""

    kernel: str
    grid: tuple[int, int]
    tensors: tuple[Any, ...]
    numbers: tuple[float, ...]
    constants: dict[str, Any]


@dataclass
class Recorder:
    """fails: constants with which a launch raises."""

    launches: list[Launch] = field(default_factory=list)
    fails: dict[str, Any] = field(default_factory=dict)

    def replace_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module, names in ((backend, KERNELS), (prefix, SHARED_KERNELS)):
            for name in names:
                monkeypatch.setattr(module, name, _Kernel(name, self))

    def taken(self) -> list[Launch]:
        """What has been launched since the last call."""
        launches, self.launches = self.launches, []
        return launches


@dataclass
class _Kernel:
    name: str
    recorder: Recorder

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            fails = self.recorder.fails
            if fails and all(constants.get(key) == value for key, value in fails.items()):
                raise RuntimeError("out of resource: shared memory")
            tensors = tuple(one for one in arguments if hasattr(one, "dtype"))
            numbers = tuple(one for one in arguments if not hasattr(one, "dtype"))
            self.recorder.launches.append(Launch(self.name, grid, tensors, numbers, constants))

        return launch
