"""Memory over a hundred thousand requests: the benchmark of it, held to its bound."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.figures import Figure

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_memory.py"
NUM_REQUESTS = 100_000


@pytest.mark.reliability("H3", "100,000 short requests over 64 connections, one in a hundred wrong")
def test_a_hundred_thousand_requests_leave_no_memory_behind(tmp_path: Path, figure: Figure, at_full_size: bool) -> None:
    if not at_full_size:
        pytest.skip("takes a minute or two; test_abuse.py counts the objects that fewer requests leave")
    output = tmp_path / "memory.json"
    command = [sys.executable, str(BENCHMARK), "--requests", str(NUM_REQUESTS), "--output", str(output)]
    subprocess.run(command, check=False, timeout=900)  # it fails where its own bound does
    result = json.loads(output.read_text())
    statuses = {int(status): count for status, count in result["statuses"].items()}
    figure("answered", sum(statuses.values()), at_least=NUM_REQUESTS)
    assert statuses == {200: NUM_REQUESTS * 99 // 100, 400: NUM_REQUESTS // 100}
    figure("growth by a request", result["bytes_per_request"], "B", at_most=20)
    figure("of the first tenth's memory at the end", result["ratio"], at_most=1.05)
