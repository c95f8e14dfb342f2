"""Many ``callboard`` commands in a short time: a process that has imported everything forks for each of them.

A fork is a process of its own, with its own exit code, standard error and memory; only Python's imports are paid once.

    python -m tests.workers.forge     reads a JSON list of arguments a line, writes a JSON object a line
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.pace import far

ROOT = Path(__file__).parents[2]
USUAL_S = 20


@dataclass(frozen=True)
class Ended:
    """A command that has ended.  peak_bytes: of resident memory."""

    code: int
    stderr: str
    took_s: float
    peak_bytes: int


class Forge:
    """A context manager: the process that forks."""

    def __enter__(self) -> "Forge":
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.workers.forge"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, *arguments: str) -> Ended:
        """``callboard`` with these arguments, which must end by itself."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(arguments), file=self._process.stdin, flush=True)
        return Ended(**json.loads(self._process.stdout.readline()))


def run(arguments: list[str]) -> Ended:
    """In a fork of this process."""
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(stderr.fileno(), 2)
            signal.alarm(int(far(USUAL_S)))  # for a command that serves where it should have refused
            code = 1
            try:
                main(arguments)
                code = 0
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 1
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status, usage = os.wait4(pid, 0)
        took_s = time.monotonic() - began
        stderr.seek(0)
        return Ended(os.waitstatus_to_exitcode(status), stderr.read(), took_s, usage.ru_maxrss * 1024)


if __name__ == "__main__":
    import server.run.serve  # noqa: F401
    from server.cli import main

    for line in sys.stdin:
        ended = run(json.loads(line))
        print(json.dumps(vars(ended)), flush=True)
