"""The command ``python -m tests.fuzz``: foreign bytes that are made to reach new code, against each target in turn.

Owns: the arguments, a process for each target, what is said of a finding.  Does not know: what is read.
"""

import argparse
import importlib.util
import logging
import subprocess
import sys
from pathlib import Path

from tests.fuzz.target import CORPUS, TARGETS, target

# Of one input: longer is a hang, more is a blow-up.
MOST_SECONDS, MOST_MB, MOST_BYTES = 20, 2048, 16384


def fuzz(name: str, options: list[str]) -> None:
    """In a process of its own, which libFuzzer ends."""
    import atheris

    logging.disable()  # what readers say of most inputs
    # Of what is ours and of the packages in Python that read for it, branches are seen.
    with atheris.instrument_imports(include=["engine", "server", "aiohttp.multipart", "aiohttp.helpers"]):
        importlib.import_module(f"tests.fuzz.{name}")
    with target(name) as read:
        atheris.Setup([sys.argv[0], *options], read)
        atheris.Fuzz()


def check(name: str, seconds: int, folder: Path) -> bool:
    """Whether nothing was found in so many seconds.  folder: keeps what was reached, for the next time."""
    reached = folder / name
    reached.mkdir(parents=True, exist_ok=True)
    limits = (f"-timeout={MOST_SECONDS}", f"-rss_limit_mb={MOST_MB}", f"-max_len={MOST_BYTES}")
    options = [f"-max_total_time={seconds}", *limits, f"-artifact_prefix={folder}/{name}-", "-print_final_stats=1"]
    command = [sys.executable, "-m", "tests.fuzz", "--target", name, *options, str(reached), str(CORPUS / name)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    said = done.stdout.decode(errors="replace")
    runs = [line.split()[-1] for line in said.splitlines() if line.startswith("stat::number_of_executed_units")]
    print(f"{name}: {(runs or ['no'])[0]} inputs, {'a finding' if done.returncode else 'nothing found'}", flush=True)
    if done.returncode:
        print(f"{said[-4000:]}\nread it again: python -m tests.fuzz --target {name} INPUT", flush=True)
    return not done.returncode


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seconds", type=int, default=600, help="of all targets together")
    parser.add_argument("--only", choices=TARGETS, help="one target instead of all")
    parser.add_argument("--folder", type=Path, default=Path(".venv/fuzz"), help="for inputs that reach new code")
    parser.add_argument("--target", choices=TARGETS, help="run libFuzzer in this process, with its own arguments")
    given, options = parser.parse_known_args()
    if importlib.util.find_spec("atheris") is None:
        print("fuzz: atheris is not installed here, which has no build for this Python or machine; skipped")
    elif given.target:
        fuzz(given.target, options)
    else:
        names = [given.only] if given.only else TARGETS
        found = [name for name in names if not check(name, max(1, given.seconds // len(names)), given.folder)]
        sys.exit(f"findings: {', '.join(found)}" if found else 0)


main()
