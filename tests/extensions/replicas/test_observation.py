"""What a router says of its replicas: /metrics, /stats and /load of all of them in one answer."""

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.scheduling.board import BoardRow, Pool
from server.proxy.observation import added_up, labelled
from tests.extensions.replicas.test_administration import NUM_REPLICAS, routed_servers

NAMES = {f"replica{number}" for number in range(NUM_REPLICAS)}


async def test_every_sample_says_which_replica_it_is_of() -> None:
    async with routed_servers() as (_, ask, _):
        status, text = await ask("/metrics", method="GET")
        families = {family.name: family for family in text_string_to_metric_families(text)}
        running = families["callboard_num_requests_running"]
        assert {sample.labels["replica"] for sample in running.samples} == NAMES
        assert running.type == "gauge"
        assert families["callboard_e2e_request_latency_seconds"].type == "histogram"
        assert {sample.name for sample in families["callboard_generation_tokens"].samples} == {
            "callboard_generation_tokens_total"
        }
        assert [sample.value for sample in families["callboard_router_replica_ready"].samples] == [1.0] * NUM_REPLICAS
        assert status == 200


async def test_one_that_does_not_answer_is_left_out_and_said_to_be_lost() -> None:
    async with routed_servers() as (_, ask, replicas):
        replicas.all[0].url = "http://127.0.0.1:1"
        replicas.lose(replicas.all[0], "it is gone")
        _, text = await ask("/metrics", method="GET")
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert [sample.value for sample in families["callboard_router_replica_losses"].samples] == [1.0, 0.0]


async def test_the_page_sees_the_sum_and_each_one() -> None:
    async with routed_servers() as (_, ask, _):
        status, body = await ask("/stats", method="GET")
        assert (status, set(body["replicas"])) == (200, NAMES)
        each = list(body["replicas"].values())
        assert body["status"] == "ready"
        assert body["requests"]["max_running"] == sum(one["requests"]["max_running"] for one in each) > 0
        assert body["pages"]["page_size"] == each[0]["pages"]["page_size"]
        assert {row["replica"] for row in body["mailboxes"]} == NAMES
        assert (await ask("/load", method="GET"))[0] == 200


@pytest.mark.parametrize("path", ["/stats", "/load", "/metrics", "/explain/a%2Fb?x=%2F"])
async def test_who_asks_for_headers_only_or_names_the_host_is_answered_as_others_are(path: str) -> None:
    async with routed_servers() as (_, ask, _):
        expected = 404 if "explain" in path else 200
        for method, target in (("GET", path), ("HEAD", path), ("GET", "http://x" + path)):
            assert (method, target, (await ask(target, method=method))[0]) == (method, target, expected)


async def test_the_pools_cells_mean_the_rows_and_prefixes_of_their_own_replica() -> None:
    """Runs are lists and no rows, and their numbers are places in other lists."""

    async with routed_servers() as (servers, ask, _):
        for server in servers:
            monitor = server.monitor
            monitor.rows = tuple(BoardRow(number, "decoding", 9, 4, 9, 1, 5, 0.25, 1.5, 2.0) for number in (1, 2))
            monitor.pool = Pool(9, 1, ((4, 0, -1), (2, 1, 0), (3, 5, 0)), 3, ((3, 8),))
            server.call(lambda monitor=monitor: monitor.cache(list(range(16))))
            server.call(lambda monitor=monitor: monitor.run(seconds=1.0, decodes=8))
        status, body = await ask("/stats", method="GET")
        assert status == 200
        assert body["pool"] == {
            "pages": 18,
            "cell_pages": 1,
            "runs": [[4, 0, -1], [2, 1, 0], [3, 5, 0], [4, 0, -1], [2, 1, 1], [3, 7, 1]],
            "evictions": 6,
            "evicted": [],
        }
        second = body["board"][7 - 4]
        assert (second["number"], second["replica"]) == (2, "replica1")
        assert [span["output_tokens"] for span in body["history"]] == [16]
        assert [step["replica"] for step in body["steps"]] == ["replica0", "replica1"]


def test_spans_of_one_time_are_one() -> None:
    def stats(*ages: float) -> dict[str, Any]:
        spans = [{"age_s": age, "output_tokens": 10, "most_rows": 4, "busy": 0.5} for age in ages]
        return {"history": spans}

    assert added_up({"a": stats(7.0, -1.0), "b": stats(-4.0)})["history"] == [
        {"age_s": 7.0, "output_tokens": 10, "most_rows": 4, "busy": 0.25},
        {"age_s": -1.0, "output_tokens": 20, "most_rows": 8, "busy": 0.5},
    ]


def test_numbers_are_added_times_are_the_longest_and_trees_stay_trees() -> None:
    def stats(parents: list[int], ttft: float | None) -> dict[str, Any]:
        rows = [{"parent": parent, "tokens": 16} for parent in parents]
        return {"status": "ready", "tokens": {"output": 3}, "latency": {"ttft": {"p50": ttft}}, "prefixes": rows}

    whole = added_up({"a": stats([-1, 0], 0.5), "b": {**stats([-1, 0, 1], None), "status": "loading"}})
    assert whole["tokens"] == {"output": 6}
    assert whole["latency"] == {"ttft": {"p50": 0.5}}
    assert [row["parent"] for row in whole["prefixes"]] == [-1, 0, -1, 2, 3]
    assert [row["replica"] for row in whole["prefixes"]] == ["a", "a", "b", "b", "b"]
    assert whole["status"] == "ready"


def test_labels_are_kept_beside_the_replica() -> None:
    text = '# HELP x_total Of x.\n# TYPE x_total counter\nx_total{why="a b"} 2.0\n'
    (family,) = labelled({"one": text, "two": text})
    assert [(sample.name, sample.labels) for sample in family.samples] == [
        ("x_total", {"why": "a b", "replica": name}) for name in ("one", "two")
    ]
