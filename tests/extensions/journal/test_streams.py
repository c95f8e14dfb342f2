"""Streams that are rejoined: on the same server, and on one that was started after the first was killed."""

import gc
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.actors.operations import SettingsChanged
from engine.settings.sections import LimitsSection, ServerSection, StorageSection
from engine.types.versions import mark
from server.extensions.journal import journal as journal_module
from server.extensions.journal import streams as streams_module
from server.extensions.journal.journal import Entry, Journal
from server.extensions.journal.records import Delivered, Ended, decode, encode
from server.extensions.journal.segments import JournalSegments
from tests.pace import at_some_pace
from tests.server.fake_ingress import FakeIngress
from tests.server.http_client import RawClient, Reply
from tests.server.live_server import CARD, MODEL, LiveServer

CALCULATOR = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
TOOLS = [{"name": "look", "input_schema": {"type": "object"}}]
ASKED = [{"role": "user", "content": "a question"}]
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "one", "max_tokens": 9}),
    "usage and ids": (
        "/v1/completions",
        {
            "prompt": "one",
            "max_tokens": 9,
            "return_token_ids": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "logprobs and echo": ("/v1/completions", {"prompt": "one", "max_tokens": 9, "logprobs": 2, "echo": True}),
    "stop string": ("/v1/completions", {"prompt": "four", "max_tokens": 30, "stop": ["be\nta"]}),
    "chat": ("/v1/chat/completions", {"messages": ASKED, "logprobs": True, "top_logprobs": 1}),
    "chat with a call": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "!call"}], "tools": [CALCULATOR]},
    ),
    "chat with thoughts": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "!think"}]}),
    "response": (
        "/v1/responses",
        {"input": "a question", "store": False, "include": ["message.output_text.logprobs"]},
    ),
    "message with a call": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "!call"}], "tools": TOOLS, "max_tokens": 90},
    ),
    "native": ("/generate", {"text": "one", "sampling_params": {"max_new_tokens": 9}}),
}


def storage(folder: Path, **changed: Any) -> StorageSection:
    return StorageSection(**{"folder": str(folder), "journal_streams": True, "fsync": "never", **changed})


def server(folder: Path, *, delay_s: float = 0.0, limits: LimitsSection | None = None, **changed: Any) -> LiveServer:
    return LiveServer(
        FakeIngress(delay_s=delay_s),
        storage=storage(folder, **changed),
        server=ServerSection(api_key=("mine", "yours"), operator_key="an operator's"),
        limits=limits,
    )


def ask(
    live: LiveServer,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    after: int | None = None,
    name: str = "stream/1:a",
    key: str = "mine",
) -> Reply:
    with RawClient(live.port) as client:
        send(client, path, body, after=after, name=name, key=key)
        return client.read_reply()


def send(
    client: RawClient,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    after: int | None = None,
    name: str = "stream/1:a",
    key: str = "mine",
) -> None:
    fields = b"" if body is None else json.dumps({"model": MODEL, "stream": True, **body}).encode()
    head = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}"]
    head += ["Content-Type: application/json", f"Content-Length: {len(fields)}", f"X-Request-Id: {name}"]
    head += [] if after is None else [f"Last-Event-ID: {name}:{after}"]
    client.send("\r\n".join([*head, "", ""]).encode() + fields)


def rejoin(live: LiveServer, after: int | None, *, name: str = "stream/1:a", key: str = "mine") -> Reply:
    return ask(live, f"/v1/streams/{name}", after=after, name=name, key=key)


def events_of(reply: Reply) -> list[str]:
    """Each event, without the words that end the stream."""
    assert reply.status == 200, reply
    *events, rest = reply.body.decode().split("\n\n")
    assert rest == ""
    return [event for event in events if event != "data: [DONE]"]


def check_numbers(events: list[str], after: int, name: str = "stream/1:a") -> None:
    for number, event in enumerate(events, after + 1):
        assert f"id: {name}:{number}\n" in event + "\n", event


def crash(
    folder: Path, target: Path, num_records: int, change: Callable[[bytes], bytes] = lambda record: record
) -> Path:
    """The journal of ``folder`` as a kill leaves it when so many records of its one request are written."""
    journal = Journal(folder / streams_module.FOLDER, fsync="never", most_bytes=1 << 26)
    (entry,) = journal.entries.values()
    journal.close()
    files = JournalSegments(target / streams_module.FOLDER)
    files.begin()
    for record in entry.records[:num_records]:
        files.write([change(record)])
    files.close()
    return target


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveServer]:
    with server(tmp_path) as one:
        yield one


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_goes_on_behind_any_event(live: LiveServer, kind: str) -> None:
    path, body = STREAMS[kind]
    whole = ask(live, path, body)
    events = events_of(whole)
    check_numbers(events, 0)
    for after in range(len(events) + 1):
        rest = rejoin(live, after)
        assert events_of(rest) == events[after:]
        assert rest.body.endswith(b"[DONE]\n\n") == whole.body.endswith(b"[DONE]\n\n")
        assert events_of(ask(live, path, body, after=after)) == events[after:], "the same request, sent once more"
    assert events_of(rejoin(live, None)) == events
    assert live.call(lambda: len(live.ingress.opened)) == 1, "nothing was computed twice"


@pytest.mark.slow
@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_goes_on_after_a_crash_at_any_record(tmp_path: Path, kind: str) -> None:
    path, body = STREAMS[kind]
    with server(tmp_path / "first") as live:
        events = events_of(ask(live, path, body))
    journal = Journal(tmp_path / "first" / streams_module.FOLDER, fsync="never", most_bytes=1 << 26)
    num_records = len(journal.entries[1].records)
    journal.close()
    for written in range(1, num_records + 1):
        folder = crash(tmp_path / "first", tmp_path / f"{written}", written)
        with server(folder) as live:
            after = min(written - 1, len(events) - 1)
            rest = events_of(rejoin(live, after))
            assert rest == events[after:]
            assert events_of(rejoin(live, None)) == events
            assert live.call(lambda live=live: len(live.ingress.opened)) == (written < num_records - 1)


def marked(record: bytes) -> bytes:
    """The record as it is after an update of the weights."""
    one = decode(record)
    if not isinstance(one, Delivered):
        return record
    return encode(msgspec.structs.replace(one, delta=msgspec.structs.replace(one.delta, result=mark(0, "step-1"))))


def test_a_stream_of_weights_that_were_updated_does_not_go_on(tmp_path: Path) -> None:
    with server(tmp_path / "first") as live:
        events = events_of(ask(live, *STREAMS["completion"]))
    folder = crash(tmp_path / "first", tmp_path / "second", 3, marked)
    with server(folder) as live:
        again = events_of(rejoin(live, 1))
        assert live.call(lambda: len(live.ingress.opened)) == 0
    assert len(again) < len(events)
    assert "weights_changed" in again[-1]


def test_choices_go_on_each_for_itself(tmp_path: Path) -> None:
    body = {"prompt": "one", "max_tokens": 9, "n": 3, "seed": 5, "return_token_ids": True}
    with server(tmp_path / "first", delay_s=0.002) as live:
        events = events_of(ask(live, "/v1/completions", body))
    for written in range(1, 29, 3):
        folder = crash(tmp_path / "first", tmp_path / f"{written}", written)
        with server(folder) as live:
            after = written - 1
            again = events_of(rejoin(live, after))
            check_numbers(again, after)
            assert told_by_choice(events[:after] + again) == told_by_choice(events)


def told_by_choice(events: list[str]) -> dict[int, list[int]]:
    told: dict[int, list[int]] = {}
    for event in events:
        (choice,) = json.loads(event.partition("data: ")[2])["choices"]
        told.setdefault(choice["index"], []).extend(choice["token_ids"])
    return told


def test_seeds_that_nobody_gave_stay_the_same(tmp_path: Path) -> None:
    with server(tmp_path / "first") as live:
        events = events_of(ask(live, "/v1/completions", {"prompt": "one", "temperature": 1, "max_tokens": 9}))
    with server(crash(tmp_path / "first", tmp_path / "second", 4)) as live:
        assert events_of(rejoin(live, 3)) == events[3:]


def test_a_client_that_goes_away_may_come_back_in_time(tmp_path: Path) -> None:
    with server(tmp_path, delay_s=0.02) as live:
        with RawClient(live.port) as client:
            send(client, "/v1/completions", {"prompt": "one", "max_tokens": 30, "ignore_eos": True})
            client.read_until(b"stream/1:a:2\n")
        again = events_of(rejoin(live, 2))
        check_numbers(again, 2)
        assert len(again) == 28
        assert live.call(lambda: len(live.ingress.opened)) == 1


def test_a_client_that_stays_away_ends_its_stream(tmp_path: Path) -> None:
    with server(tmp_path, delay_s=0.01, rejoin_s=0.3) as live:
        with RawClient(live.port) as client:
            send(client, "/v1/completions", {"prompt": "!hang"})
            assert live.wait_until(lambda: live.ingress.num_open == 1, 5)
        assert live.wait_until(lambda: live.ingress.num_open == 0, 5)
        refusal = rejoin(live, None)
        assert (refusal.status, refusal.error["code"]) == (404, "stream_not_found")
        assert events_of(ask(live, "/v1/completions", {"prompt": "one"}))
        are_gone = live.wait_until(lambda: all(path.stat().st_size <= 8 for path in tmp_path.rglob("*.log")), 5)
        assert are_gone, "what has ended is forgotten after that time too"


def test_the_last_one_who_joins_has_the_stream(tmp_path: Path) -> None:
    with server(tmp_path, delay_s=0.05) as live, RawClient(live.port) as first:
        send(first, "/v1/completions", {"prompt": "one", "max_tokens": 20, "ignore_eos": True})
        first.read_until(b"stream/1:a:2\n")
        with RawClient(live.port) as second:
            send(second, "/v1/streams/stream/1:a", after=1)
            second.read_until(b"stream/1:a:2\n")
            with pytest.raises((ConnectionError, EOFError, AssertionError)):
                while True:
                    first.read_until(b"\n\n")
            second.read_until(b"stream/1:a:20\n")


@pytest.mark.parametrize(
    ("ask_for", "status", "code"),
    [
        (lambda live: rejoin(live, 1, name="other"), 404, "stream_not_found"),
        (lambda live: rejoin(live, 1, key="yours"), 404, "stream_not_found"),
        (lambda live: ask(live, "/v1/completions", {"prompt": "one"}, after=1, key="yours"), 404, "stream_not_found"),
        (lambda live: rejoin(live, 10**6), 400, "invalid_value"),
        (lambda live: rejoin(live, -1), 400, "invalid_value"),
        (lambda live: rejoin(live, 10**30), 400, "invalid_value"),
        (lambda live: ask(live, "/v1/streams/other", after=1), 400, "invalid_value"),
        (lambda live: ask(live, "/v1/completions", {"prompt": "two"}, after=1), 409, "stream_mismatch"),
        (lambda live: ask(live, "/v1/chat/completions", {"messages": ASKED}, after=1), 409, "stream_mismatch"),
    ],
)
def test_what_cannot_be_rejoined_is_refused(
    live: LiveServer, ask_for: Callable[[LiveServer], Reply], status: int, code: str
) -> None:
    assert ask(live, "/v1/completions", {"prompt": "one"}).status == 200
    refusal = ask_for(live)
    assert (refusal.status, refusal.error["code"]) == (status, code)
    assert rejoin(live, 1).status == 200, "a stream suffers from it"


def test_where_nothing_is_kept_that_is_said() -> None:
    with LiveServer() as live:
        refusal = rejoin(live, 1)
        assert (refusal.status, refusal.error["code"]) == (404, "stream_not_found")
        assert "storage.journal_streams" in refusal.error["message"]


@pytest.mark.parametrize("prompt", ["!refuse", "!timeout", "!fail"])
def test_a_failure_is_told_again(tmp_path: Path, prompt: str) -> None:
    with server(tmp_path / "first") as live:
        first = ask(live, "/v1/completions", {"prompt": prompt, "max_tokens": 9})
        again = rejoin(live, None)
        assert (again.status, again.body) == (first.status, first.body)
    with server(tmp_path / "first") as live:
        after = rejoin(live, None)
        assert (after.status, after.body) == (first.status, first.body)


def test_a_server_that_is_stopped_leaves_its_streams_to_the_next(tmp_path: Path) -> None:
    body = {"prompt": "one", "max_tokens": 60, "ignore_eos": True, "seed": 3}
    with server(tmp_path / "whole") as live:
        events = events_of(ask(live, "/v1/completions", body))
    with server(tmp_path / "folder", delay_s=0.02, rejoin_s=1e-6) as live:
        client = RawClient(live.port)
        send(client, "/v1/completions", body)
        client.read_until(b"stream/1:a:3\n")
    with pytest.raises((ConnectionError, EOFError, AssertionError)):  # cut, and not ended
        client.read_until(b"[DONE]")
    client.socket.close()
    with server(tmp_path / "folder") as live:
        again = events_of(rejoin(live, 3))
    check_numbers(again, 3)
    assert [text_of(event) for event in again] == [text_of(event) for event in events[3:]]


def test_a_restart_is_explained_as_such(tmp_path: Path) -> None:
    def parts(live: LiveServer) -> dict[str, float]:
        reply = ask(live, "/explain/stream/1:a")
        assert reply.status == 200, reply.body
        return {part["name"]: part["seconds"] for part in reply.json["parts"]}

    path, body = STREAMS["completion"]
    with server(tmp_path / "whole") as live:
        events_of(ask(live, path, body))
        assert "receiving" in parts(live), "one that has just come"
        assert "waiting" not in parts(live)
    crash(tmp_path / "whole", tmp_path / "crashed", 4)
    ingress = FakeIngress()
    ingress.ready = False
    with LiveServer(ingress, storage=storage(tmp_path / "crashed"), server=ServerSection(api_key=("mine",))) as live:
        time.sleep(0.4)
        ingress.ready = True
        rejoin(live, None)
        told = parts(live)
        assert told["waiting"] > 0.3
        assert not {"receiving", "accepting"} & told.keys()


@at_some_pace
def test_a_stream_that_is_given_up_before_the_engine_is_there_does_not_go_on(tmp_path: Path, pace: float) -> None:
    with server(tmp_path / f"whole {pace}") as live:
        events_of(ask(live, "/v1/completions", {"prompt": "one", "max_tokens": 9}))
    crash(tmp_path / f"whole {pace}", tmp_path / f"crashed {pace}", 4)
    ingress = FakeIngress()
    ingress.ready = False
    section = storage(tmp_path / f"crashed {pace}", rejoin_s=0.1 * pace)
    with LiveServer(ingress, storage=section, server=ServerSection(api_key=("mine",))) as live:
        with RawClient(live.port) as client:
            send(client, "/v1/streams/stream/1:a")
            client.read_until(b"stream/1:a:3\n")
        time.sleep(0.4 * pace)
        assert rejoin(live, None).status == 404
        ingress.ready = True
        time.sleep(0.4 * pace)
        assert not live.call(lambda: ingress.opened)


def text_of(event: str) -> str:
    return str(json.loads(event.partition("\ndata: ")[2])["choices"][0]["text"])


def test_a_stream_belongs_to_the_model_that_was_applied_when_it_began(tmp_path: Path) -> None:
    def apply(live: LiveServer, fingerprint: str) -> None:
        card = msgspec.structs.replace(live.backend.card, fingerprint=fingerprint)
        changed = SettingsChanged(limits=LimitsSection(), about=msgspec.msgpack.encode(card))
        live.call(lambda: [call(changed) for call in live.backend.ingress.settings_watchers])

    with server(tmp_path) as live:
        apply(live, "another")
        ask(live, "/v1/completions", {"prompt": "one"})
    card = msgspec.structs.replace(CARD, fingerprint="another")
    with LiveServer(card=card, storage=storage(tmp_path), server=ServerSection(api_key="mine")) as live:
        assert rejoin(live, None).status == 200
        apply(live, "a third")
    with server(tmp_path) as live:
        assert rejoin(live, None).status == 404, "the model of the start has not answered"


def test_a_key_that_is_gone_takes_its_streams_along(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with server(tmp_path / "first") as live:
        ask(live, "/v1/completions", {"prompt": "one"})
    folder = crash(tmp_path / "first", tmp_path / "second", 3)
    with LiveServer(storage=storage(folder), server=ServerSection(api_key="another")) as live:
        assert rejoin(live, None, key="another").status == 404
        assert live.call(lambda: live.ingress.opened) == []
    assert "the API key of this stream is no longer valid" in caplog.text


def test_a_key_that_is_changed_keeps_its_streams_as_it_keeps_what_is_stored(tmp_path: Path) -> None:
    path, keys = STREAMS["completion"][0], tmp_path / "keys.toml"
    section = ServerSection(key_file=str(keys))
    keys.write_text('[clients]\nalice = "old-------------"\nbob = "other-----------"\n')
    with LiveServer(storage=storage(tmp_path / "first"), server=section) as live:
        events = events_of(ask(live, path, STREAMS["completion"][1], key="old-------------"))
        keys.write_text('[clients]\nalice = "new-------------"\nbob = "other-----------"\n')
        time.sleep(1.1)  # the file is looked at once a second
        assert events_of(rejoin(live, 2, key="new-------------")) == events[2:]
        assert [rejoin(live, 2, key=key).status for key in ("old-------------", "other-----------")] == [401, 404]
    folder = crash(tmp_path / "first", tmp_path / "second", 4)
    keys.write_text('[clients]\nalice = "newest----------"\nbob = "other-----------"\n')
    with LiveServer(storage=storage(folder), server=section) as live:
        again = rejoin(live, 2, key="newest----------")
        assert len(events_of(again)) == len(events) - 2
        assert rejoin(live, 2, key="other-----------").status == 404


def test_what_a_client_may_have_open_counts_streams_that_run_on(tmp_path: Path) -> None:
    limits = LimitsSection(max_requests_per_client=1)
    with server(tmp_path, limits=limits) as live:
        with RawClient(live.port) as client:
            send(client, "/v1/completions", {"prompt": "!hang"})
            assert live.wait_until(lambda: live.ingress.num_open == 1, 5)
        assert ask(live, "/v1/completions", {"prompt": "one"}, name="b").status == 429
        assert ask(live, "/v1/completions", {"prompt": "one"}, name="b", key="yours").status == 200


def test_a_journal_that_cannot_be_written_is_no_reason_to_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server(tmp_path) as live, monkeypatch.context() as patched:
        patched.setattr(JournalSegments, "write", lambda self, records: (_ for _ in ()).throw(OSError(28, "No space")))
        first = events_of(ask(live, "/v1/completions", {"prompt": "one"}))
        check_numbers(first, 0)
        plain = ask(live, "/v1/completions", {"prompt": "one"}, name="b")
        assert b"id: " not in plain.body, "what cannot be rejoined has no ids"
        assert rejoin(live, 1, name="b").status == 404
        assert events_of(rejoin(live, 1)) == first[1:], "from memory"
        metrics = ask(live, "/metrics", key="an operator's").body
        assert b"callboard_journal_failing 1.0" in metrics


def test_a_slow_client_gets_everything(tmp_path: Path) -> None:
    with server(tmp_path) as live, RawClient(live.port, receive_buffer=4096) as client:
        send(client, "/v1/completions", {"prompt": "!flood", "max_tokens": 900, "ignore_eos": True})
        assert live.wait_until(lambda: len(live.ingress.opened) == 1 and live.ingress.num_open == 0, 10)
        time.sleep(0.2)
        reply = client.read_reply()
        events = events_of(reply)
        check_numbers(events, 0)
        assert len(events) == 900


def test_a_stream_is_of_the_model_that_was_there_when_it_came(tmp_path: Path) -> None:
    """Applied settings may have made it another one than the server has started with."""
    path, body = STREAMS["completion"]
    with server(tmp_path) as one:
        card = msgspec.structs.replace(one.backend.card, fingerprint="another")
        changed = SettingsChanged(limits=LimitsSection(), about=msgspec.msgpack.encode(card))
        for watcher in one.ingress.settings_watchers:
            one.call(partial(watcher, changed))
        events_of(ask(one, path, body))
    with server(tmp_path) as one:
        assert rejoin(one, None).status == 404


def entries_of(monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    """Returns where the entries of journals will be, in the order of their beginnings."""
    entries: list[Entry] = []
    begin = Journal.begin

    def noted(journal: Journal) -> Entry:
        entries.append(begin(journal))
        return entries[-1]

    monkeypatch.setattr(Journal, "begin", noted)
    return entries


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_stream_without_room_in_memory_is_its_readers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    monkeypatch.setattr(journal_module, "RECORD_BYTES", 1 << 20)  # 4 of 8 MB are there for streams that run
    entries = entries_of(monkeypatch)
    with server(tmp_path, delay_s=0.02, journal_mb=8) as live:
        with RawClient(live.port) as client:
            num_tokens = 40 if comes_back else 500
            send(client, "/v1/completions", {"prompt": "one", "max_tokens": num_tokens, "ignore_eos": True})
            client.read_until(b"stream/1:a:12\n")
            if comes_back:
                assert rejoin(live, 2).status == 404
                client.read_until(b"stream/1:a:40\n")
                client.read_until(b"[DONE]")
                assert sum(map(len, entries[0].records[1:-1])) == 0, "nothing is kept of what its reader has"
        assert live.wait_until(lambda: live.ingress.num_open == 0, 2), "no client can come back to it"


def test_what_a_stream_is_taken_for_is_what_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = entries_of(monkeypatch)

    def take() -> int:
        one.ingress.opened.clear()
        one.ingress.asked.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    with server(tmp_path, rejoin_s=600) as one:
        body = {"prompt": "one", "max_tokens": 9, "user": "x" * 3000}
        ask(one, "/v1/completions", body, name="first")
        tracemalloc.start()
        try:
            before = one.call(take)
            for number in range(100):
                ask(one, "/v1/completions", body, name=f"r{number}")
            taken = one.call(take) - before
        finally:
            tracemalloc.stop()
        counted = sum(entry.num_bytes for entry in entries[1:])
        assert taken < counted < 2.5 * taken, (taken, counted)


def test_ended_streams_are_kept_as_long_as_was_left(tmp_path: Path) -> None:
    with server(tmp_path / "first") as live:
        ask(live, "/v1/completions", {"prompt": "one"})
    journal = Journal(tmp_path / "first" / streams_module.FOLDER, fsync="never", most_bytes=1 << 26)
    records = journal.entries[1].records
    journal.close()
    for age, status in ((100.0, 404), (0.0, 200)):
        ended = decode(records[-1])
        assert isinstance(ended, Ended)
        folder = tmp_path / f"{age}"
        files = JournalSegments(folder / streams_module.FOLDER)
        files.begin()
        files.write([*records[:-1], encode(Ended(ended.number, ended.at, time.time() - age))])
        files.close()
        with server(folder) as live:
            time.sleep(0.1)
            assert rejoin(live, None).status == status
