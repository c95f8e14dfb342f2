"""Scripts under benchmarks/ import each other by their own names, as they do when they are run."""

import sys
from pathlib import Path

from tests.graphs.conftest import collector

__all__ = ["collector"]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
