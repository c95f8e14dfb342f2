"""GET /explain/{id}: parts that add up to what a client has measured, and what each client may see."""

import json
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from engine.config import Config, build_config
from engine.features.explain.explanation import Explained, TimeShare
from engine.features.explain.session_turns import TurnDifference
from engine.messages import Finish
from server import clients
from server.extensions.explain.difference import causes_of
from tests.pace import at_some_pace, far
from tests.server.http_client import RawClient, Reply, ask, http_bytes
from tests.server.live_server import MODEL, LiveServer
from tests.server.live_system import LiveSystem
from tests.server.test_keys import BOTH, bearer, keys_in

SETTINGS = {
    "model": {"path": str(Path(__file__).parents[2] / "examples" / "demo_model")},
    "kv": {"num_pages": 48},
    "scheduler": {"max_running": 4},
}
OFF_S = 0.25  # beside 2 %: here the clients are threads of the server's process, which wait for its interpreter lock
CLOCKS_S = 0.01  # the numbers are rounded


@pytest.fixture(scope="module")
def system() -> Iterator[LiveSystem]:
    with LiveSystem(build_config(Config(), SETTINGS)) as live:
        yield live


def explained(port: int, name: str) -> dict[str, Any]:
    reply = ask(port, "GET", f"/explain/{name}")
    assert reply.status == 200, reply.body
    told: dict[str, Any] = reply.json
    assert sum(part["seconds"] for part in told["parts"]) == pytest.approx(told["seconds"], abs=2e-5)
    assert all(part["seconds"] > 0 for part in told["parts"])
    assert all(part["text"].endswith(".") for part in told["parts"])
    return told


def parts_of(told: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {part["name"]: part for part in told["parts"]}


def test_parts_are_what_clients_have_measured_under_load(system: LiveSystem) -> None:
    shared = list(range(3, 120))
    measured: dict[str, float] = {}

    def timed(number: int) -> dict[str, Any]:
        prompt = [*shared, number] if number % 3 else [number + 5] * (20 + 4 * number)
        return {"prompt": prompt, "max_tokens": 10 + number, "stream": bool(number % 2), "number": number}

    def complete(prompt: list[int], number: int, **fields: Any) -> Reply:
        headers = {"X-Request-Id": f"load-{number}"}
        began = time.monotonic()
        body = {"model": "tested", "prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
        reply = ask(system.port, "POST", "/v1/completions", body, headers)
        measured[f"load-{number}"] = time.monotonic() - began
        return reply

    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda fields: complete(**fields), map(timed, range(36))))
    assert all(reply.status == 200 for reply in replies)
    names, off = set(), []
    for name, seconds in measured.items():
        told = explained(system.port, name)
        names |= set(parts_of(told))
        assert told["ended"]
        off.append(abs(told["seconds"] - seconds) - 0.02 * seconds)
        assert told["choices"][0]["finish"] == "length"
    assert statistics.median(off) <= OFF_S, "either end may be late now and then, on a busy machine"
    assert names >= {"receiving", "tokenizing", "queue", "prefill", "decode", "delivery"}


def test_the_answers_id_is_a_name_too_and_the_slowest_choice_is_told(system: LiveSystem) -> None:
    reply = system.complete([5, 6, 7], {"X-Request-Id": "several"}, max_tokens=20, n=3)
    told = explained(system.port, reply.json["id"])
    assert told == explained(system.port, "several")
    assert told["names"] == [reply.json["id"]]
    assert len({choice["number"] for choice in told["choices"]}) == told["num_choices"] == 3
    seconds = {choice["number"]: choice["seconds"] for choice in told["choices"]}
    assert seconds[told["number"]] >= max(seconds.values()) - 0.01, "those that end in one step were opened in turn"


def test_the_compiling_of_a_grammar_is_a_part(system: LiveSystem) -> None:
    if system.system._forms.grammars is None:
        pytest.skip("no grammar plugin is installed")
    reply = system.complete(
        [5, 6], {"X-Request-Id": "grammar"}, ignore_eos=False, max_tokens=40, guided_regex="[a-z]{3}"
    )
    assert reply.status == 200, reply.body
    assert parts_of(explained(system.port, "grammar"))["grammar"]["seconds"] > 0


def post(name: str, key: str = "", **fields: Any) -> bytes:
    headers = {"X-Request-Id": name} | ({"Authorization": f"Bearer {key.ljust(16, '-')}"} if key else {})
    body = {"model": MODEL, "prompt": "p", **fields}
    return http_bytes("POST", "/v1/completions", json.dumps(body).encode(), headers)


@pytest.mark.parametrize(
    "shared, was, now, causes",
    [
        ("assistant\n", "<think>so be it</think>yes", "yes<|im_end|>", ["thoughts"]),
        ("assistant\n<think>\n", "so be it</think>yes", "\n</think>yes", ["thoughts"]),
        ("</think>\n", "yes, I do", "no, I do not", ["answer"]),
        ("", " yes,\n  I do", "yes, I do not", ["spaces"]),
        ("", "yes, I do", "yes, I do not", ["tokens"]),
    ],
)
def test_texts_around_a_difference_show_its_cause(shared: str, was: str, now: str, causes: list[str]) -> None:
    found = TurnDifference(1, 5, 9, True, b"", b"", b"")
    assert causes_of(found, shared, was, now, ("<think>", "</think>")) == causes


def test_a_request_that_runs_is_explained_until_now(live: LiveServer) -> None:
    with RawClient(live.port) as client:
        client.send(post("open", prompt="!hang"))
        assert live.wait_until(lambda: live.ingress.num_open == 1, 2)
        first = explained(live.port, "open")
        assert not first["ended"]
        assert parts_of(first)["unknown"]["text"].startswith("The engine knows nothing of it")
        assert explained(live.port, "open")["seconds"] > first["seconds"]
    latest = time.monotonic() + far(2)
    while not (told := explained(live.port, "open"))["ended"]:
        assert time.monotonic() < latest
    assert told == explained(live.port, "open")


def tell(live: LiveServer, *told: Explained) -> None:
    live.call(lambda: setattr(live.monitor, "explained", told))


def engine_saw(number: int, until: float, *parts: TimeShare, **more: Any) -> Explained:
    """A request that was in the engine for a tenth of a second."""
    return Explained(
        request_id=number, arrived_at=until - 0.1, until=until, finish=Finish.STOP, grammar_s=0.0, num_prompt_tokens=8,
        num_cached_tokens=0, num_output_tokens=3, num_retractions=0, parts=parts, **{"missed": {}, **more},
    )  # fmt: skip


def test_who_may_ask_and_whose_names_are_told(tmp_path: Path) -> None:
    with LiveServer(server=keys_in(tmp_path, BOTH)) as live:
        for key, name in (("a", "of-alice"), ("b", "of-bob")):
            with RawClient(live.port) as client:
                client.send(post(name, key))
                assert client.read_reply().status == 200
        hers, his = (stream.request_id for stream in live.ingress.opened)
        queue = TimeShare("queue", 1e-5, {"running": 1.0}, ((hers, 1e-5),))
        tell(live, engine_saw(his, time.monotonic(), queue, missed={hers: 2}))

        def asked(key: str, name: str) -> Reply:
            return ask(live.port, "GET", f"/explain/{name}", headers=bearer(key))

        assert [asked(key, "of-alice").status for key in ("", "a", "b", "o")] == [401, 200, 404, 200]
        told = {key: asked(key, "of-bob").json["missed"] for key in ("b", "o")}
        assert told == {
            key: [{"id": name, "number": hers if name else None, "pages": 2}]
            for key, name in (("b", None), ("o", "of-alice"))
        }
        assert b"of-alice" not in asked("b", "of-bob").body


def test_a_call_of_several_choices_is_named_once() -> None:
    with LiveServer() as live:
        for name in ("several", "one", "mine"):
            with RawClient(live.port) as client:
                client.send(post(name, n=3 if name == "several" else 1))
                assert client.read_reply().status == 200
        *others, mine = (stream.request_id for stream in live.ingress.opened)
        shares = tuple((number, 1e-5) for number in others)
        tell(live, engine_saw(mine, time.monotonic(), TimeShare("queue", 1e-5, {"running": 4.0}, shares)))
        queue = parts_of(explained(live.port, "mine"))["queue"]
        assert queue["text"].endswith("4 others had rows meanwhile, longest several, one.")
        assert [other["number"] for other in queue["others"]] == others


@at_some_pace
def test_a_reader_that_is_slow_at_the_end_is_a_part(pace: float) -> None:
    with LiveServer() as live, RawClient(live.port, receive_buffer=4096) as client:
        client.send(post("slow", prompt="!flood", max_tokens=900, stream=True))
        began = time.monotonic()
        time.sleep(pace)
        assert client.read_reply().status == 200
        took = time.monotonic() - began
        time.sleep(0.3 * pace)
        tell(live, engine_saw(live.ingress.opened[0].request_id, began + 0.1))
        told = explained(live.port, "slow")
        assert told["seconds"] == pytest.approx(took, abs=0.2 * pace)
        assert parts_of(told)["slow_reader"]["seconds"] > 0.7 * pace


def test_a_reader_that_keeps_up_is_no_part() -> None:
    with LiveServer() as live, RawClient(live.port) as client:
        client.send(post("fast", prompt="!flood", max_tokens=20, stream=True))
        assert client.read_reply().status == 200
        tell(live, engine_saw(live.ingress.opened[0].request_id, time.monotonic() - 60))
        assert "slow_reader" not in parts_of(explained(live.port, "fast"))


def test_the_time_in_which_a_request_lies_unread_is_a_part() -> None:
    with LiveServer() as live, RawClient(live.port) as client:
        client.send(post("first"))
        client.read_reply()
        blocked, go_on = Event(), Event()
        blocking = Thread(target=lambda: live.call(lambda: blocked.set() or go_on.wait(far(1))))
        blocking.start()
        assert blocked.wait(far(1))
        before_sending = time.monotonic()
        client.send(post("lay"))
        sent = time.monotonic()
        time.sleep(0.4)
        least_s = time.monotonic() - sent
        go_on.set()
        client.read_reply()
        most_s = time.monotonic() - before_sending
        blocking.join()
        told = explained(live.port, "lay")
        assert least_s - CLOCKS_S <= parts_of(told)["accepting"]["seconds"] <= most_s + CLOCKS_S


def test_the_end_of_an_answer_ends_the_parts_though_the_engine_went_on() -> None:
    with LiveServer() as live:
        with RawClient(live.port) as client:
            client.send(post("stopped"))
            client.read_reply()
        now = time.monotonic()
        decode = TimeShare("decode", 0.1 + 5.0)
        tell(live, engine_saw(live.ingress.opened[0].request_id, now + 5.0, decode))
        told = explained(live.port, "stopped")
        assert told["seconds"] < 5.0
        assert list(parts_of(told))[-1] == "tokenizing", "the answer had ended when the engine began, by these times"


def test_of_many_choices_the_first_and_the_last_are_remembered() -> None:
    with LiveServer() as live:
        reply = ask(live.port, "POST", "/v1/completions", {"model": MODEL, "prompt": ["p"] * 60, "max_tokens": 1})
        numbers = [stream.request_id for stream in live.ingress.opened]
        tell(live, *(engine_saw(number, time.monotonic()) for number in numbers))
        told = explained(live.port, reply.json["id"])
        assert told["num_choices"] == 60
        kept = [choice["number"] for choice in told["choices"]]
        assert kept == [numbers[0], *numbers[1 - clients.MOST_CHOICES :]]


def test_of_those_that_have_ended_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MOST_ENDED", 2)
    with LiveServer() as live:
        for name in ("one", "two", "three"):
            with RawClient(live.port) as client:
                client.send(post(name))
                client.read_reply()
        statuses = [ask(live.port, "GET", f"/explain/{name}").status for name in ("one", "two", "three")]
        assert statuses == [404, 200, 200]


@pytest.mark.parametrize("name", ["nobody", "%20", "a/b", "x" * 300])
def test_an_unknown_request_is_a_404_that_says_how_many_are_kept(live: LiveServer, name: str) -> None:
    reply = ask(live.port, "GET", f"/explain/{name}")
    assert (reply.status, reply.json["error"]["code"]) == (404, "request_not_found")
    assert str(clients.MOST_ENDED) in reply.json["error"]["message"]
