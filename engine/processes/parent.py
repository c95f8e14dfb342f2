"""The tie between a child process and its parent: the child never outlives it.

Owns: the two ways a child learns of its parent's death.  Does not know: what either of them does.
The kernel kills the child when the parent dies (Linux: PR_SET_PDEATHSIG, which nothing can block, whatever the child is
doing).  The end of the pipe that the parent holds open says the same on any system.
"""

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1


def die_with(parent: int, pipe: int) -> None:
    """From now on this process ends when ``parent`` does; at once if it has already.

    pipe: a descriptor whose other end only the parent holds."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_watch, args=(pipe,), name="parent-watch", daemon=True).start()


def _watch(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os._exit(1)
