"""What each test takes, the processor's time and waiting apart: a pytest plugin that ``tests/conftest.py`` loads.

    pytest -n 2 --costs=benchmarks/results/tests_2core_cpu.json

A phase of a test (its fixtures, its call, its end) costs the time of the clock, and the processor's time of the test's
process and of the processes that ended in it.  The rest is waiting: for a process that lives on, for a timer, or for a
core that another process has.  A file's cost is the sum over its tests.

Owns: the option, the two clocks, the table.  Does not know: what is tested.
"""

import os
import runpy
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
SLOWEST = 10

phase_s = pytest.StashKey[tuple[float, float]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", metavar="FILE", type=Path, help="write there what each file of tests takes")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--costs")
    if path and not hasattr(config, "workerinput"):  # in the process that all reports come to
        config.pluginmanager.register(Costs(path))


def processor_s() -> float:
    """Seconds that this process and its ended children have had of a processor."""
    took = os.times()
    return took.user + took.system + took.children_user + took.children_system


def measured(item: pytest.Item) -> Iterator[None]:
    clock, processor = time.monotonic(), processor_s()
    try:
        return (yield)
    finally:
        item.stash[phase_s] = time.monotonic() - clock, processor_s() - processor


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    return (yield from measured(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    return (yield from measured(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    return (yield from measured(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """The report carries the phase's cost, also from another process."""
    report = yield
    report.cost_s = item.stash[phase_s]
    return report


class Costs:
    """Adds up reports as they come in, also from other processes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = time.monotonic()
        self._files: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._tests: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for table, key in ((self._files, report.nodeid.partition("::")[0]), (self._tests, report.nodeid)):
            for index, seconds in enumerate(report.cost_s):  # type: ignore[attr-defined]
                table[key][index] += seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        counts = {name: len(terminalreporter.stats.get(name, [])) for name in ("passed", "failed", "skipped")}
        keep = runpy.run_path(str(ROOT / "benchmarks" / "machine.py"))["keep"]
        keep(
            self._path,
            {
                "run_s": round(time.monotonic() - self._began, 1),
                "processor_s": round(sum(cost[1] for cost in self._files.values()), 1),
                **counts,
                "files": rows(self._files, least_s=1.0),
                "tests": rows(self._tests, least_s=10.0),
            },
        )
        table = Table("file", "clock, s", "processor, s", "waiting, s", title=str(self._path))
        for row in rows(self._files, least_s=0.0)[:SLOWEST]:
            figures = (row["clock_s"], row["processor_s"], row["clock_s"] - row["processor_s"])  # type: ignore[operator]
            table.add_row(str(row["name"]), *(f"{figure:.1f}" for figure in figures))
        Console(width=120).print(table)


def rows(costs: dict[str, list[float]], least_s: float) -> list[dict[str, object]]:
    """Names with both times, the longest first, without those that take less by the clock."""
    lines = sorted(((name, *cost) for name, cost in costs.items() if cost[0] >= least_s), key=lambda line: -line[1])
    return [{"name": name, "clock_s": round(clock, 2), "processor_s": round(busy, 2)} for name, clock, busy in lines]
