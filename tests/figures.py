"""What the reliability tests measure, beside what they promise: a pytest plugin that ``tests/conftest.py`` loads.

A test that shows a row of docs/reliability.md carries the mark and hands over its figures:

    @pytest.mark.reliability("P1", "SIGKILL of the executor under 32 streams")
    def test_...(figure: Figure) -> None:
        ...
        figure("ready again", took, "s", at_most=10)
        figure("/ready is 503", took, "s", at_most=0.1, patience=10)
        figure("streams that end", done, at_least=32)

A test fails when a value is past its bound; ``patience`` multiplies the bound for that, for figures that a busy machine
may spoil, and so does how busy it is then.  Without ``--reliability`` a duration with patience may always last
``PATIENT_S``, since the load of a machine is known late.  A test without a figure is a row too, whose verdict says
whether it passed.  All tests of one id and text, such as the cases of a parametrised one, share their rows, which have
the worst value of each figure.

    pytest -m reliability --reliability=benchmarks/results/reliability_2core_cpu.json        (``make reliability``)

runs these tests alone, prints the table and writes it; a bound that is missed, patience or not, ends that with code 1.
Tests that take long have a smaller form for all other runs; the fixture ``at_full_size`` says which one is wanted.

Owns: the mark, the fixture, the option, the table.  Does not know: what is tested.
"""

import json
import re
import runpy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from tests.pace import crowding

Figure = Callable[..., None]
MARK = "reliability"
PATIENT_S = 20.0
ROOT = Path(__file__).parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--reliability", metavar="FILE", type=Path, help="write the figures of the reliability tests there"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}(id, injected): a row of docs/reliability.md, and what is done to it")
    path = config.getoption("--reliability")
    if path and not hasattr(config, "workerinput"):  # in the process that all reports come to
        config.pluginmanager.register(Report(path))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say in every report what the test is about: reports, unlike marks, come back from other processes."""
    for item in items:
        for mark in item.iter_markers(MARK):
            number, injected = mark.args
            item.user_properties.append((MARK, f"{number} {injected}"))


@pytest.fixture(scope="session")
def at_full_size(pytestconfig: pytest.Config) -> bool:
    """Whether a test that also has a smaller form, for which `make test` has the time, is to have its whole size."""
    return pytestconfig.getoption("--reliability") is not None


@pytest.fixture
def figure(request: pytest.FixtureRequest, at_full_size: bool) -> Figure:
    """Record a value and hold it to its bound."""
    assert request.node.get_closest_marker(MARK), f"figures are for tests with pytest.mark.{MARK}"

    def record(
        name: str,
        value: float,
        unit: str = "",
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        patience: float = 0.0,
    ) -> None:
        assert (at_most is None) != (at_least is None), "a figure has one bound"
        entry = {"name": name, "value": float(value), "unit": unit, "at_most": at_most, "at_least": at_least}
        request.node.user_properties.append(("figure", json.dumps(entry)))
        said = f"{name}: {value:.4g} {unit}"
        patient = patience * crowding() if patience else 1.0  # what a busy machine cannot spoil has no patience
        if at_most is not None:
            may_wait = patience and unit == "s" and not at_full_size
            allowed = max(at_most * patient, PATIENT_S * crowding() if may_wait else 0.0)
            assert value <= allowed, f"{said}, more than {allowed:.3g} {unit}, for a bound of {at_most} {unit}"
        if at_least is not None:
            assert value * patient >= at_least, f"{said}, less than {at_least} {unit} over {patient:.3g}"

    return record


@dataclass
class Row:
    """One line of the table: the worst of what tests with one id, text and figure have said."""

    name: str
    unit: str
    at_most: float | None
    at_least: float | None
    value: float
    times: int = 1

    def add(self, value: float) -> None:
        """Another case of it."""
        self.times += 1
        self.value = max(self.value, value) if self.at_most is not None else min(self.value, value)

    @property
    def missed(self) -> bool:
        """Whether the worst is past the bound."""
        return (self.at_most is not None and self.value > self.at_most) or (
            self.at_least is not None and self.value < self.at_least
        )

    @property
    def bound(self) -> str:
        """As it is printed."""
        return f"<= {self.at_most:g}" if self.at_most is not None else f">= {self.at_least:g}"


@dataclass
class Case:
    """All tests of one id and text."""

    number: str
    injected: str
    rows: dict[str, Row] = field(default_factory=dict)
    num_tests: int = 0
    failed: bool = False
    skipped: str = ""

    def verdict(self, row: Row | None) -> str:
        """In a word or two."""
        if self.failed:
            return "FAILED"
        if row is not None:
            return "MISSED" if row.missed else "holds"
        return "holds" if self.num_tests else f"skipped: {self.skipped}"

    def table(self) -> Iterator[dict[str, Any]]:
        """Its lines; one without a figure if it has none."""
        for row in [*self.rows.values()] or [None]:
            line: dict[str, Any] = {"id": self.number, "injected": self.injected, "tests": self.num_tests}
            if row is not None:
                line |= {"figure": row.name, "value": row.value, "unit": row.unit, "bound": row.bound}
                line |= {"times": row.times}
            yield line | {"verdict": self.verdict(row)}


class Report:
    """Gathers reports as they come in, also from other processes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cases: dict[str, Case] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        about = [str(value) for name, value in report.user_properties if name == MARK]
        for key in about:
            number, _, injected = key.partition(" ")
            case = self._cases.setdefault(key, Case(number, injected))
            case.failed |= report.failed
            if report.skipped and isinstance(report.longrepr, tuple):
                case.skipped = str(report.longrepr[2]).removeprefix("Skipped: ")
            if report.when != "call" or report.skipped:
                continue
            case.num_tests += 1
            for name, text in report.user_properties:
                if name == "figure":
                    row = Row(**json.loads(str(text)))
                    if (known := case.rows.setdefault(row.name, row)) is not row:
                        known.add(row.value)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == 0 and any(row.missed for case in self._cases.values() for row in case.rows.values()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        lines = [line for _, case in sorted(self._cases.items(), key=in_order) for line in case.table()]
        runpy.run_path(str(ROOT / "benchmarks" / "machine.py"))["keep"](self._path, {"rows": lines})
        terminalreporter.write_line("")
        table = Table("id", "what is done", "figure", "value", "bound", "verdict", title=str(self._path))
        for line in lines:
            value = f"{line['value']:.3g} {line['unit']}" if "value" in line else ""
            table.add_row(line["id"], line["injected"], line.get("figure"), value, line.get("bound"), line["verdict"])
        Console(width=160).print(table)


def in_order(entry: tuple[str, Case]) -> tuple[str, int, str]:
    """P2 before P10."""
    letters, digits = re.fullmatch(r"([A-Z]+)([0-9]*)", entry[1].number).groups()  # type: ignore[union-attr]
    return letters, int(digits or 0), entry[1].injected
