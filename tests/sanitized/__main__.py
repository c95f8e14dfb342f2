"""The command ``python -m tests.sanitized``: random calls of the kernels in C under the sanitizers of its compiler.

Owns: the arguments.  Does not know: what is called.
"""

import argparse

from tests.sanitized.process import check, run
from tests.sanitized.sanitizers import levels, missing


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sanitized")
    parser.add_argument("--seconds", type=float, default=120.0, help="of calls, over all kinds of CPUs")
    parser.add_argument("--seed", type=int, default=0, help="of the first call")
    parser.add_argument("--level", help="run in this process, for this kind of CPU")
    given = parser.parse_args()
    if given.level:
        run(given.level, given.seconds, given.seed)
    elif missing():
        print(f"sanitize: {missing()}; skipped")
    else:
        for level in levels():
            print(check(level.name, given.seconds / len(levels()), given.seed), flush=True)


main()
