"""Everything is killed under streams that are rejoined: a short run of the benchmark."""

import bench_killed
import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("options", [(), bench_killed.PROCESSES], ids=["one process", "four processes"])
async def test_after_a_kill_every_stream_goes_on_and_nothing_is_told_twice(options: tuple[str, ...]) -> None:
    report = await bench_killed.run(rounds=2, number=8, num_tokens=60, seed=1, options=options)
    assert report["wrong"] == []
    assert report["streams_cut"] > 4
