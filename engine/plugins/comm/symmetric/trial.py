"""The trial of shared memory: each rank starts a process that sums in it, and compares, before the engine does.

A trial that hangs, or that breaks its GPU's context, shares nothing with the engine: it is killed.

Owns: the limit of time, what a result holds for.  Does not know: what the process computes, how ranks agree.
"""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from engine import __version__
from engine.host.interpreters import import_path, module_command
from engine.host.kept_results import KeptResults
from engine.plugins.comm.symmetric.memory import Limits
from engine.plugins.hookspecs import CommContext

PROCESS = "engine.plugins.comm.symmetric.trial_process"
# GPUs are moved between two boots; a driver may also be replaced without one.
BOOT_ID, DRIVER = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/driver/nvidia/version")
KILLED_S = 5.0


class MemoryTrial:
    """One rank's process.  known: what was wrong in an earlier trial here, '' for nothing; None without one.

    command: of the process, which fails with a status that is not 0 and the reason on its last line of stderr."""

    def __init__(self, command: Sequence[str], limit_s: float, kept: KeptResults[str]) -> None:
        self._command = command
        self._limit_s = limit_s
        self._kept = kept
        self.known = kept.load()

    @property
    def path(self) -> Path | None:
        """The file with the result, without which the next start tries again."""
        return self._kept.path

    def run(self) -> None:
        """Run the process until it ends, at most until the limit.  Raises RuntimeError unless all was right."""
        end, kept_open = os.pipe()  # its end shows the process that this one is gone
        try:
            # A session of its own: compilers that it has started end with it.
            process = subprocess.Popen(
                self._command,
                stdin=end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**os.environ, **import_path()},
                start_new_session=True,
            )
            errors = self._errors_of(process)
        finally:
            os.close(end)
            os.close(kept_open)
        if process.returncode < 0:
            what = signal.Signals(-process.returncode).name
            raise RuntimeError(f"a trial in a process of its own was ended by {what}")
        if process.returncode:
            said = errors.decode(errors="replace").split("\n")
            reason = next((line for line in reversed(said) if line.strip()), f"exit code {process.returncode}")
            raise RuntimeError(f"a trial in a process of its own failed: {reason.strip()}")

    def _errors_of(self, process: "subprocess.Popen[bytes]") -> bytes:
        """Return what a process has written when it ended.  Raises RuntimeError at the limit."""
        try:
            return process.communicate(timeout=self._limit_s)[1]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"a trial in a process of its own was not done after {self._limit_s:g} s") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if process.stderr is not None:
                process.stderr.close()
            with suppress(subprocess.TimeoutExpired):  # a driver that hangs holds even a process that was killed
                process.wait(KILLED_S)

    def keep(self, problem: str) -> None:
        """Keep for later starts that all ranks' trials were right (''), or what was wrong with one."""
        self._kept.keep(problem)


def new_trial(context: CommContext, limits: Limits, limit_s: float) -> MemoryTrial | None:
    """Return the trial of a rank; None without one: for a rank alone, ranks on several machines, or a limit of 0.

    limits: if the switch sums, it alone is tried.  Ranks of one machine meet in a directory that is there until all are
    connected."""
    if context.size == 1 or not limit_s or not context.rendezvous.startswith("file:"):
        return None
    sizes = [str(number) for number in (*limits, limit_s)]
    where = f"{context.rendezvous}.trial{limits.by_switch or ''}"
    place = [str(context.rank), str(context.size), str(torch.cuda.current_device()), where]
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    system = [path.read_text() if path.exists() else "" for path in (BOOT_ID, DRIVER)]
    holds_for = ([str(gpu.uuid) for gpu in gpus], context.size, sizes[:3], torch.__version__, __version__, system)
    about = f"{context.size} of {gpus[0].name}"
    command = module_command(PROCESS, *place, *sizes)
    return MemoryTrial(command, limit_s, KeptResults("shared memory", about, holds_for, str))
