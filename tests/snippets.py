"""The commands and programs that README and the quick start show, and what they say comes out.

``make snippets`` (``python -m tests.snippets``) runs them in an environment with nothing in it but PATH and an empty
HOME, in a folder that holds examples/ alone, and compares what they print.  In pages,

- a block of ``console`` has commands behind ``$``, each followed by what it prints, if that is shown; three dots stand
  for anything;
- a block of ``python`` is a program; the block of ``text`` behind it is what it prints;
- ``<!-- not run: REASON -->`` above a block says that it is not run, and why;
- ``<!-- server: COMMAND -->`` says that the command serves while the block is run.

Owns: reading blocks, running them.  Does not know: what they are about.
"""

import doctest
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_port

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "quickstart.md")
BLOCK = re.compile(
    r"(?:^ *<!-- (?P<mark>not run|server): (?P<said>[^\n]*?) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)^(?P=indent)```$"
    r"(?:\n\n(?P=indent)```text\n(?P<output>.*?)^(?P=indent)```$)?",
    re.MULTILINE | re.DOTALL,
)
PORT = "8000"
TIMEOUT_S = 300
COMPARE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A block of a page.  skipped: why it is not run, None if it is.  server: what serves meanwhile."""

    page: str
    line: int
    language: str
    text: str
    output: str
    skipped: str | None
    server: str

    def commands(self) -> Iterator[tuple[str, str]]:
        """Each command of a console, and what it is said to print."""
        if self.language != "console":
            return
        joined = self.text.replace("\\\n", " ")
        for part in re.split(r"^\$ ", joined, flags=re.MULTILINE)[1:]:
            command, _, printed = part.partition("\n")
            yield command, printed


def read_blocks(page: Path) -> list[Block]:
    """All blocks of a page but those of what programs print."""
    text = page.read_text()
    return [
        Block(
            page.name,
            text.count("\n", 0, found.start()) + 1,
            found["language"],
            textwrap.dedent(found["text"]),
            textwrap.dedent(found["output"] or ""),
            found["said"] if found["mark"] == "not run" else None,
            found["said"] if found["mark"] == "server" else "",
        )
        for found in BLOCK.finditer(text)
        if found["language"] != "text"
    ]


class Runner:
    """Runs blocks in ``folder`` with ``environment``; ``port`` stands in for the one that the pages show."""

    def __init__(self, folder: Path, environment: dict[str, str], port: int) -> None:
        self._folder = folder
        self._environment = environment
        self._port = str(port)

    def run(self, block: Block) -> list[str]:
        """Returns a complaint for each thing that printed something else than the page shows."""
        with self._serving(block.server):
            if block.language == "python":
                return self._compare(block, [sys.executable, "-c", block.text.replace(PORT, self._port)], block.output)
            return [
                complaint
                for command, printed in block.commands()
                for complaint in self._compare(block, ["bash", "-c", command.replace(PORT, self._port)], printed)
            ]

    def _compare(self, block: Block, command: list[str], expected: str) -> list[str]:
        ran = subprocess.run(
            command,
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        where = f"{block.page}:{block.line}: {command[-1].splitlines()[0]}"
        if ran.returncode:
            return [f"{where}\nends with {ran.returncode}:\n{ran.stderr[-2000:]}"]
        if expected and not doctest.OutputChecker().check_output(expected, ran.stdout, COMPARE):
            return [f"{where}\nprints:\n{ran.stdout}\ninstead of:\n{expected}"]
        return []

    @contextmanager
    def _serving(self, command: str) -> Iterator[None]:
        if not command:
            yield
            return
        words = [*command.split(), "--port", self._port]
        with subprocess.Popen(
            words, cwd=self._folder, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as server:
            assert server.stdout is not None
            said: list[str] = []
            for line in server.stdout:
                said.append(line)
                if " is ready after " in line:
                    break
            else:
                raise RuntimeError(f"{command}: did not start:\n{''.join(said)}")
            try:
                yield
            finally:
                server.terminate()
                server.stdout.read()


def main() -> int:
    """Run everything; print what differs.  Returns how many blocks do."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        (home / "examples").symlink_to(ROOT / "examples")
        # What `. .venv/bin/activate` would do has been done.
        path = f"{Path(sys.executable).parent}{os.pathsep}/usr/bin{os.pathsep}/bin"
        (home / ".venv").symlink_to(Path(sys.prefix))
        runner = Runner(
            home, {"PATH": path, "HOME": name, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, free_port()
        )
        failed = 0
        for block in (block for page in PAGES for block in read_blocks(page)):
            if block.skipped is not None or block.language not in ("console", "python"):
                continue
            complaints = runner.run(block)
            print(f"{block.page}:{block.line}: {'differs' if complaints else 'as shown'}", flush=True)
            print("\n".join(complaints), end="\n" if complaints else "")
            failed += bool(complaints)
        return failed


if __name__ == "__main__":
    sys.exit(main())
