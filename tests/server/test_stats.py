"""What /stats says: rates, steps, the picture of the prefix cache, and what it keeps to itself."""

import pytest

from engine.scheduling.board import MAX_NODES
from engine.scheduling.meter import Distribution, StepRecord
from engine.settings.sections import ServerSection
from server.operators.stats import quantile, rates
from tests.server.http_client import ask
from tests.server.live_server import MODEL, LiveServer

SHARED = list(range(64))


def test_steps_rates_and_pages_are_there() -> None:
    with LiveServer() as live:
        live.call(lambda: live.monitor.run(seconds=1.0, decodes=8, prefill_tokens=200))
        live.call(lambda: live.monitor.run(seconds=1.0, decodes=10))
        live.call(live.monitor.end)
        reply = ask(live.port, "GET", "/stats")
        stats = reply.json
        assert reply.headers["cache-control"] == "no-store"
        assert (stats["status"], stats["model"], stats["about"]) == ("ready", MODEL, "a toy")
        assert stats["requests"] == {"open": 0, "running": 3, "waiting": 2, "max_running": 64}
        assert stats["tokens_per_s"] == {"decode": 9.0, "prefill": 100.0}
        assert stats["pages"] == {"free": 50, "cached": 30, "used": 20, "host_used": 0, "page_size": 16}
        assert [(step["id"], step["decodes"], step["prefill_tokens"]) for step in stats["steps"]] == [
            (0, 8, 200),
            (1, 10, 0),
        ]
        assert [step["age_s"] for step in stats["steps"]] == [1.0, 0.0]
        assert stats["latency"]["step"]["p50"] == pytest.approx(0.75)  # in the bucket from 0.5 to 1
        assert stats["mailboxes"] == [{"name": "scheduler", "waiting": 1, "peak": 7, "capacity": 2112, "taken": 0}]
        assert stats["ended"]["stop"] == 1


def test_the_prefix_cache_is_drawn_parents_first() -> None:
    with LiveServer() as live:
        live.call(lambda: live.monitor.cache([*SHARED, *range(100, 132)]))
        live.call(lambda: live.monitor.cache([*SHARED, *range(200, 232)]))
        nodes = ask(live.port, "GET", "/stats").json["prefixes"]
        assert [(node["parent"], node["first_token"], node["tokens"], node["children"]) for node in nodes] == [
            (-1, 0, 64, 2),
            (0, 64, 32, 0),
            (0, 64, 32, 0),
        ]
        assert nodes[0]["text"].startswith("0 1 2 3")


def test_prompts_are_not_shown_where_others_may_look() -> None:
    with LiveServer(server=ServerSection(api_key=["one", "two"], operator_key="three")) as live:
        live.call(lambda: live.monitor.cache(SHARED))
        reply = ask(live.port, "GET", "/stats", headers={"Authorization": "Bearer three"})
        assert [node["text"] for node in reply.json["prefixes"]] == [None]
    with LiveServer() as live:
        live.call(lambda: live.monitor.cache(SHARED))
        live.call(lambda: live.monitor.cache(SHARED, "tenant-secret"))
        reply = ask(live.port, "GET", "/stats")
        assert {node["salted"]: node["text"] is None for node in reply.json["prefixes"]} == {False: False, True: True}
        assert b"tenant-secret" not in reply.body


def test_the_answer_stays_small_whatever_is_cached() -> None:
    with LiveServer() as live:

        def fill() -> None:
            for number in range(3000):
                live.monitor.cache([*range(16), *[number] * 16, *[number + 1] * 16])
            for _ in range(1000):
                live.monitor.run(seconds=0.001, decodes=1)

        live.call(fill)
        reply = ask(live.port, "GET", "/stats")
        assert len(reply.json["prefixes"]) == MAX_NODES
        assert not reply.json["prefixes_complete"]
        assert len(reply.json["steps"]) == 256
        assert len(reply.body) < 64 << 10


def test_a_server_whose_model_loads_has_little_to_say() -> None:
    with LiveServer() as live:
        live.ingress.ready, live.monitor.meter = False, None
        stats = ask(live.port, "GET", "/stats").json
        assert (stats["status"], stats["tokens"], stats["steps"]) == ("not_ready", {}, [])


def test_rates_of_a_record_that_is_full_are_over_what_it_covers() -> None:
    steps = [StepRecord(number, number * 0.1, (number + 1) * 0.1, 5, 0, 0) for number in range(100)]
    assert rates(steps, 10.0)["decode"] == pytest.approx(50, rel=0.05)
    assert rates(steps[-10:], 10.0)["decode"] == pytest.approx(50, rel=0.05)
    assert rates(steps, 100.0) == {"decode": 0.0, "prefill": 0.0}
    assert rates([], 1.0)["decode"] == 0.0


def test_quantiles_lie_within_their_buckets() -> None:
    distribution = Distribution((1.0, 2.0, 4.0))
    assert quantile(distribution, 0.5) is None
    distribution.note(1.5, 90)
    distribution.note(3.0, 9)
    distribution.note(100.0)
    assert quantile(distribution, 0.45) == pytest.approx(1.5)
    assert 2.0 < (quantile(distribution, 0.95) or 0) < 4.0
    assert quantile(distribution, 0.999) == 4.0  # nothing is known beyond the last edge
