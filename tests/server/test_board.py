"""The board over HTTP: who sees which words, and that a request of a real engine is on it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.null_engine import NullSystem
from engine.config import Config, build_config
from engine.scheduling.board import FIRST_ROW, BoardRow, Pool
from engine.scheduling.meter import Span
from engine.settings.sections import ServerSection
from engine.types.prompt import ChatTurn
from server.operators.board import MAX_WORDS_CHARS, first_words, history
from tests.server.http_client import RawClient, ask, http_bytes
from tests.server.live_server import MODEL as FAKE
from tests.server.live_server import LiveServer
from tests.server.live_system import MODEL, LiveSystem

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
KEYS = """
[clients]
alice = "a---------------"
bob = "b---------------"
[operators]
olga = "o---------------"
"""


def test_a_request_of_a_whole_engine_is_on_the_board_until_it_is_aborted() -> None:
    config = build_config(Config(), {"model": {"path": str(DEMO), "name": MODEL}, "kv": {"num_pages": 64}})
    with LiveSystem(config, partial(NullSystem, step_s=0.002)) as live, RawClient(live.port) as client:
        fields = {"model": MODEL, "prompt": "first line\nWhat is a page?", "max_tokens": 900, "ignore_eos": True}
        body = json.dumps({**fields, "stream": True}).encode()
        client.send(http_bytes("POST", "/v1/completions", body, {"X-Request-Id": "mine"}))
        client.read_until(b"data: ")
        stats = ask(live.port, "GET", "/stats").json
        (row,) = stats["board"]
        assert (row["id"], row["words"], row["state"]) == ("mine", "What is a page?", "decoding")
        assert row["prompt_tokens"] == row["prefilled_tokens"] > 0
        assert sum(count for count, shown, _ in stats["pool"]["runs"] if shown == FIRST_ROW) == stats["pages"]["used"]
        assert {box["name"] for box in stats["mailboxes"] if box["taken"]} >= {"ingress", "tokenizer", "scheduler"}
        assert sum(span["output_tokens"] for span in stats["history"]) > 0
        assert ask(live.port, "POST", "/abort_request", {"rid": row["id"]}).json["num_aborted"] == 1
        assert live.wait_until(lambda gauges: gauges.num_running == 0, 2)
        assert ask(live.port, "GET", "/stats").json["board"] == []


def begin(client: RawClient, prompt: str, key: str = "") -> None:
    headers = {"X-Request-Id": f"of-{key}", **({"Authorization": f"Bearer {key.ljust(16, '-')}"} if key else {})}
    body = json.dumps({"model": FAKE, "prompt": prompt}).encode()
    client.send(http_bytes("POST", "/v1/completions", body, headers))


def board_of(live: LiveServer, key: str = "") -> list[dict[str, Any]]:
    for stream in live.call(lambda: list(live.ingress.opened)):
        if stream.request_id not in {row.request_id for row in live.monitor.rows}:
            live.monitor.rows += (BoardRow(stream.request_id, "decoding", 9, 4, 9, 1, 5, 0.25, 1.5, 2.0),)
    reply = ask(live.port, "GET", "/stats", headers={"Authorization": f"Bearer {key.ljust(16, '-')}"} if key else {})
    assert reply.status == 200, reply.body
    return reply.json["board"]  # type: ignore[no-any-return]


def test_without_keys_all_is_one_persons() -> None:
    with LiveServer() as live, RawClient(live.port) as client:
        begin(client, "!hang\non   to this\n")
        assert live.wait_until(lambda: live.ingress.num_open == 1, 5)
        (row,) = board_of(live)
        assert row.pop("client") == "127.0.0.1"
        assert row == {
            "number": 1, "id": "of-", "words": "on to this", "state": "decoding", "prompt_tokens": 9,
            "cached_tokens": 4, "prefilled_tokens": 9, "chunks": 1, "output_tokens": 5, "waited_s": 0.25,
            "decoding_s": 1.5, "age_s": 2.0,
        }  # fmt: skip


def test_an_operator_reads_what_it_may_also_end(tmp_path: Any) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    with (
        LiveServer(server=ServerSection(key_file=str(path))) as live,
        RawClient(live.port) as first,
        RawClient(live.port) as second,
    ):
        begin(first, "!hang alice's secret", "a")
        assert live.wait_until(lambda: live.ingress.num_open == 1, 5)
        begin(second, "!hang bob's secret", "b")
        assert live.wait_until(lambda: live.ingress.num_open == 2, 5)
        seen = board_of(live, "o")
        told = [(row["client"], row["id"], row["words"]) for row in seen]
        of_alice, of_bob = ("alice", "of-a", "!hang alice's secret"), ("bob", "of-b", "!hang bob's secret")
        assert told == [of_alice, of_bob]
        assert [row["state"] for row in seen] == ["decoding"] * 2


def test_words_are_the_last_question_and_few() -> None:
    turns = (ChatTurn("system", "be brief"), ChatTurn("user", "what\n is it?"), ChatTurn("assistant", "a page"))
    assert first_words(turns, str) == "what is it?"
    assert first_words(turns[:1], str) == "be brief"
    assert first_words((5, 6, 7), lambda ids: f"ids {list(ids)}") == "ids [5, 6, 7]"
    assert first_words((), lambda ids: "") == ""
    assert len(first_words("word " * 1000, str)) == MAX_WORDS_CHARS


def test_the_past_is_told_by_its_age() -> None:
    (one,) = history([Span(2, 3, 40, 5, 8, 2.5)], 20.0)
    assert (one.age_s, one.output_tokens, one.busy) == (5.0, 40, 0.5)


def test_the_pool_is_told_in_runs() -> None:
    with LiveServer() as live:
        live.monitor.pool = Pool(9, 1, ((4, 0, -1), (5, 4, 0)), 3, ((3, 8),))
        assert ask(live.port, "GET", "/stats").json["pool"] == {
            "pages": 9, "cell_pages": 1, "runs": [[4, 0, -1], [5, 4, 0]], "evictions": 3, "evicted": [[3, 8]],
        }  # fmt: skip
