"""Traces of a rank's device thread and its GPU during some steps, for Perfetto or chrome://tracing.

Owns: torch's profiler, and the files that it writes.  Does not know: what the profiles are for, other ranks.
The profiler is started and stopped on the device thread, whose steps wait for that; the file, which may take seconds,
is written by another thread.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from engine.types.notices import Profile

log = logging.getLogger(__name__)


class Profiles:
    """Records a rank's steps, one profile at a time.  All calls come from the device thread.

    recording: whether ``step`` must wrap the launch of each step."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._profiler: torch.profiler.profile | None = None
        self._folder = Path()
        self._num_left = 0
        self._num_recorded = 0
        self.recording = False

    def begin(self, ask: Profile) -> None:
        """Profile the next steps, and end a profile that is being recorded (``Runner.profile``)."""
        self._end()
        if not ask.num_steps:
            return
        self._folder, self._num_left = Path(ask.folder), ask.num_steps
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        profiler = torch.profiler.profile(activities=activities)
        try:
            profiler.start()
        except Exception:  # another profiler may be running; requests must not fail because of it
            log.exception("rank %d cannot be profiled", self._rank)
            return
        self._profiler = profiler
        self.recording = True
        log.info("rank %d records the next %d steps", self._rank, ask.num_steps)

    @contextmanager
    def step(self, step_id: int) -> Iterator[None]:
        """Record the launch of a step, which has its name in the trace."""
        with torch.profiler.record_function(f"callboard::step {step_id}"):
            yield
        self._num_left -= 1
        if not self._num_left:
            self._end()

    def _end(self) -> None:
        profiler, self._profiler = self._profiler, None
        self.recording = False
        if profiler is None:
            return
        try:
            profiler.stop()
        except Exception:
            log.exception("rank %d's profile is lost", self._rank)
            return
        self._num_recorded += 1
        name = f"callboard-{time.strftime('%Y%m%d-%H%M%S')}-{self._num_recorded}-rank{self._rank}.json.gz"
        path = self._folder / name
        threading.Thread(target=_write, args=(profiler, path), name=f"profile{self._rank}", daemon=True).start()


def _write(profiler: torch.profiler.profile, path: Path) -> None:
    """Write a profile.  A file with its final name is always complete."""
    part = path.with_name(f"part-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(part))
        os.replace(part, path)
    except Exception as error:
        log.error("no profile was written to %s: %s", path, error)
        with suppress(OSError):
            part.unlink()
    else:
        log.info("profile written: %s (%.1f MB)", path, path.stat().st_size / 1e6)
