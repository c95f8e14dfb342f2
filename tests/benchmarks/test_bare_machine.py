"""``benchmarks/gpu_check.py`` on a machine that has torch and what usually comes with it, and never saw callboard.

The interpreter is a virtual environment of its own with links to the packages that the machine has, and no others: what
is not among them cannot be imported, nor found by its metadata.
"""

import os
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest

from tests.own_cache import link_kernels

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# Of the packages that an image for machine learning brings, those that callboard or torch's own dependencies import.
MACHINE = (
    *("aiohttp", "filelock", "fsspec", "huggingface-hub", "jinja2", "markupsafe", "mpmath", "networkx", "numpy"),
    *("packaging", "pluggy", "prometheus-client", "rich", "safetensors", "setuptools", "sympy", "tokenizers", "torch"),
    *("markdown-it-py", "mdurl", "pygments", "tqdm", "transformers", "triton", "typing-extensions", "uvloop"),
)
CARRIED = ("msgspec", "pyzmq")  # beside kernels
EVERYWHERE = r"""
import sys
from importlib import import_module
from gpu_sections.table import SECTIONS
for section in SECTIONS.values():
    import_module(section.function.partition(":")[0])
from callboard import LLM
with LLM(progress=False, config={"kv": {"num_pages": 64}}) as llm:
    assert llm.generate(["def f("])[0].token_ids
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The packages of an environment with nothing in it but Python."""
    directory = tmp_path_factory.mktemp("machine")
    venv.create(directory, with_pip=False, symlinks=True)
    (site,) = (directory / "lib").glob("python*/site-packages")
    for name in MACHINE:
        link(name, site)
    link_kernels(site / ".cache")  # its home is here
    return site


def link(name: str, site: Path) -> None:
    try:
        files = metadata.files(name)
    except metadata.PackageNotFoundError:  # as triton where it is not published
        return
    for top in {file.parts[0] for file in files or ()} - {"..", "__pycache__"}:
        target = Path(str(metadata.distribution(name).locate_file(top)))
        if target.exists() and not (site / top).exists():
            (site / top).symlink_to(target)


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}",
        "OMP_NUM_THREADS": "1",
        "HOME": str(site),
    }
    python = site.parents[2] / "bin" / "python"
    return subprocess.run(
        [python, *arguments], cwd=site, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_what_is_missing_is_said_before_any_section_with_the_way_to_carry_it(site):
    done = run(site, str(ROOT / "benchmarks" / "gpu_check.py"), "--device", "cpu", "--sections", "sampler")
    assert done.returncode == 2, done.stderr
    assert "lacks msgspec; pip install msgspec" in done.stderr
    assert "pip download" in done.stderr
    assert "sampler" not in done.stderr


def test_with_what_is_carried_every_section_can_be_imported_and_an_engine_runs(site):
    for name in CARRIED:
        link(name, site)
    done = run(site, "-c", EVERYWHERE)
    assert done.returncode == 0, done.stderr
    done = run(site, str(ROOT / "benchmarks" / "gpu_check.py"), "--device", "cpu", "--sections", "nccl")
    assert done.returncode == 0, done.stderr
    assert "flashinfer (pip install flashinfer-python)" in done.stderr
    assert sys.executable != done.args[0]
