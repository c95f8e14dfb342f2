"""/v1/batches with the official client: what is checked, what becomes of lines, and what a batch does not disturb."""

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.settings.sections import LimitsSection, ServerSection, StorageSection
from server.batches import lines as lines_module
from server.batches import routes as routes_module
from server.batches import table as table_module
from server.generate import unattended
from server.storage import store as store_module
from tests.pace import far
from tests.server.fake_ingress import FakeIngress
from tests.server.live_server import MODEL, LiveServer, connect

ENDED = ("completed", "failed", "cancelled", "expired")
COMPLETIONS = "/v1/completions"


def line(name: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    asked = {"model": MODEL, **({"prompt": "hello"} if url == COMPLETIONS else {}), **body}
    return {"custom_id": name, "method": "POST", "url": url, "body": asked}


def begin(client: openai.OpenAI, *lines: Any, endpoint: Any = COMPLETIONS, **more: Any) -> Any:
    content = b"\n".join(one if isinstance(one, bytes) else json.dumps(one).encode() for one in lines)
    file = client.files.create(file=content, purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


def wait(client: openai.OpenAI, batch: Any, *statuses: str) -> Any:
    deadline = time.monotonic() + far(20)
    while (now := client.batches.retrieve(batch.id)).status not in (statuses or ENDED):
        assert time.monotonic() < deadline, now
        time.sleep(0.01)
    return now


def wait_for_counts(client: openai.OpenAI, batch: Any, num_done: int) -> None:
    deadline = time.monotonic() + far(20)
    while client.batches.retrieve(batch.id).request_counts.completed < num_done:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def read(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """custom_id -> line; each must be there once."""
    if file_id is None:
        return {}
    rows = [json.loads(row) for row in client.files.content(file_id).read().splitlines()]
    found = {row["custom_id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def test_each_line_is_answered_as_http_would_have(client: openai.OpenAI) -> None:
    lines = [line(f"l{number}", prompt=f"p {number}", seed=number, max_tokens=5) for number in range(40)]
    lines += [line("wrong", temperature=-1), line("unknown", model="another"), line("fails", prompt="!fail")]
    batch = begin(client, *lines, metadata={"of": "a test"})
    assert batch.status == "validating"
    assert batch.expires_at - batch.created_at == 24 * 3600
    done = wait(client, batch)
    assert done.status == "completed"
    assert done.metadata == {"of": "a test"}
    assert done.request_counts.model_dump() == {"total": 43, "completed": 40, "failed": 3}
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    output, errors = read(client, done.output_file_id), read(client, done.error_file_id)
    assert list(output) == [f"l{number}" for number in range(40)]
    for number in (0, 7, 39):
        over_http = client.completions.create(model=MODEL, prompt=f"p {number}", seed=number, max_tokens=5)
        row = output[f"l{number}"]
        assert row["error"] is None
        assert row["response"]["status_code"] == 200
        assert row["response"]["body"]["choices"][0]["text"] == over_http.choices[0].text
        assert row["response"]["body"]["usage"]["total_tokens"] == over_http.usage.total_tokens
    statuses = {name: row["response"]["status_code"] for name, row in errors.items()}
    assert statuses == {"wrong": 400, "unknown": 404, "fails": 500}
    assert errors["unknown"]["response"]["body"]["error"]["code"] == "model_not_found"
    file = client.files.retrieve(done.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")


def test_a_file_may_begin_with_the_mark_that_some_editors_write(client: openai.OpenAI) -> None:
    mark = "\ufeff".encode()
    done = wait(client, begin(client, mark + json.dumps(line("a")).encode(), line("b")))
    assert list(read(client, done.output_file_id)) == ["a", "b"]
    done = wait(client, begin(client, line("a"), mark + json.dumps(line("b")).encode()))
    assert [(error.code, error.line) for error in done.errors.data] == [("invalid_json_line", 2)]
    assert [error.code for error in wait(client, begin(client, mark)).errors.data] == ["empty_file"]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/responses", {"input": "hello"}),
    ],
)
def test_other_endpoints_have_batches_too(client: openai.OpenAI, endpoint: str, body: dict[str, Any]) -> None:
    done = wait(client, begin(client, line("a", endpoint, **body), endpoint=endpoint))
    answer = read(client, done.output_file_id)["a"]["response"]["body"]
    assert answer["model"] == MODEL
    assert answer.get("store") in (None, False)


def test_an_endpoint_that_the_model_does_not_serve_is_refused(client: openai.OpenAI) -> None:
    for endpoint in ("/v1/messages", "/v1/moderations", "/v1/batches"):
        with pytest.raises(openai.BadRequestError, match="endpoint: must be one of"):
            begin(client, line("a"), endpoint=endpoint)


def test_lines_without_a_seed_draw_each_by_itself(client: openai.OpenAI, server: LiveServer) -> None:
    done = wait(client, begin(client, *(line(f"l{number}") for number in range(8)), line("own", seed=5)))
    assert done.request_counts.completed == 9
    seeds = [params.seed for _, params, _ in server.ingress.asked]
    assert None not in seeds
    assert len(set(seeds)) == 9
    assert 5 in seeds
    assert all(options.priority == (1 << 31) - 1 for _, _, options in server.ingress.asked)


@pytest.mark.parametrize(
    ("lines", "code", "number", "word"),
    [
        ([line("a"), line("b"), line("a")], "duplicate_custom_id", 3, "that of line 1"),
        ([line("a"), line("b", "/v1/chat/completions")], "mismatched_url", 2, "/v1/completions"),
        ([line("a"), b"{", line("b")], "invalid_json_line", 2, "JSON"),
        ([b"[1]"], "invalid_line", 1, "object"),
        ([b'{"custom_id": "a", "method": "POST", "url": "/v1/completions"}'], "invalid_line", 1, "body"),
        ([{**line("a"), "method": "GET"}], "invalid_line", 1, "method"),
        ([{**line("a"), "body": 3}], "invalid_line", 1, "body"),
        ([line("")], "invalid_line", 1, "custom_id"),
        ([line("a", stream=True)], "invalid_line", 1, "stream"),
        ([b'"\xff"'], "invalid_json_line", 1, "JSON"),
        ([b'{"custom_id": ' + b"[" * 100_000], "invalid_line", 1, "custom_id"),
        ([b'{"x": ' + b"[" * 100_000], "invalid_json_line", 1, "JSON"),
        ([b" ", b""], "empty_file", None, "no lines"),
    ],
)
def test_a_file_with_a_wrong_line_fails_and_says_which(
    client: openai.OpenAI, server: LiveServer, lines: list[Any], code: str, number: int | None, word: str
) -> None:
    done = wait(client, begin(client, *lines))
    assert done.status == "failed"
    assert done.failed_at is not None
    (error,) = done.errors.data
    assert (error.code, error.line) == (code, number)
    assert word in error.message
    assert server.ingress.asked == []


def test_a_file_with_too_many_or_too_long_lines_fails(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MAX_LINES", 5)
    assert wait(client, begin(client, *(line(f"l{number}") for number in range(5)))).status == "completed"
    done = wait(client, begin(client, *(line(f"l{number}") for number in range(6))))
    assert [error.code for error in done.errors.data] == ["too_many_lines"]
    done = wait(client, begin(client, line("a", prompt="x" * (5 << 20))))
    assert [error.code for error in done.errors.data] == ["line_too_long"]


def test_many_wrong_lines_are_not_all_told(client: openai.OpenAI) -> None:
    done = wait(client, begin(client, *[b"{"] * 300))
    assert len(done.errors.data) == 100


def test_bodies_that_make_no_batch(client: openai.OpenAI) -> None:
    file = client.files.create(file=b"{}", purpose="batch").id
    good = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
    for wrong in ({"completion_window": "1h"}, {"metadata": {"a": "b" * 600}}, {"endpoint": "x"}, {"input_file_id": 3},
                  {"output_expires_after": {"anchor": "created_at", "seconds": 3600}}):  # fmt: skip
        with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
            client.post("/batches", body={**good, **wrong}, cast_to=object)
    with pytest.raises(openai.NotFoundError) as caught:
        client.post("/batches", body={**good, "input_file_id": "file-x"}, cast_to=object)
    assert caught.value.code == "file_not_found"
    done = wait(client, begin(client, line("a")))
    with pytest.raises(openai.BadRequestError, match="output of a batch"):
        client.post("/batches", body={**good, "input_file_id": done.output_file_id}, cast_to=object)


def test_batches_are_listed(client: openai.OpenAI) -> None:
    made = [begin(client, line("a")).id for _ in range(3)]
    assert {one.id for one in client.batches.list()} == set(made)
    assert {one.id for one in client.batches.list(limit=1)} == set(made)
    first = client.batches.list(limit=2)
    assert len(first.data) == 2
    assert first.has_more
    assert len(client.batches.list(limit=2, after=first.data[-1].id).data) == 1
    with pytest.raises(openai.NotFoundError, match="no batch"):
        client.batches.list(after="batch_x")
    with pytest.raises(openai.NotFoundError, match="no batch"):
        client.batches.retrieve("batch_x")


def test_cancelling_keeps_what_is_answered(client: openai.OpenAI, server: LiveServer) -> None:
    lines = [line(f"l{number}", prompt="hello" if number < 5 else "!hang") for number in range(100)]
    batch = begin(client, *lines)
    wait_for_counts(client, batch, 5)
    with pytest.raises(openai.ConflictError, match="cancel it first"):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = wait(client, batch)
    assert done.status == "cancelled"
    assert done.request_counts.model_dump() == {"total": 100, "completed": 5, "failed": 0}
    output, errors = read(client, done.output_file_id), read(client, done.error_file_id)
    assert list(output) == [f"l{number}" for number in range(5)]
    assert set(errors) == {f"l{number}" for number in range(5, 100)}
    assert {row["error"]["code"] for row in errors.values()} == {"batch_cancelled"}
    assert server.wait_until(lambda: server.ingress.num_open == 0, 5)
    client.files.delete(batch.input_file_id)
    with pytest.raises(openai.ConflictError, match="has ended"):
        client.batches.cancel(batch.id)


def test_a_batch_that_takes_too_long_expires(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes_module, "WINDOW_S", 2)
    done = wait(client, begin(client, line("a"), line("b", prompt="!hang")))
    assert done.status == "expired"
    assert done.expired_at >= done.expires_at
    assert list(read(client, done.output_file_id)) == ["a"]
    assert read(client, done.error_file_id)["b"]["error"]["code"] == "batch_expired"


def test_another_keys_batches_are_not_there(storage: StorageSection) -> None:
    with LiveServer(server=ServerSection(api_key=["one", "two"]), storage=storage) as server:
        with connect(server, "one") as client, connect(server, "two") as other:
            batch = begin(client, line("a"))
            assert other.batches.list().data == []
            for call in (other.batches.retrieve, other.batches.cancel):
                with pytest.raises(openai.NotFoundError):
                    call(batch.id)
            assert wait(client, batch).status == "completed"
        clients = {options.origin.client for _, _, options in server.ingress.asked}
        salts = {options.cache_salt for _, _, options in server.ingress.asked}
        assert clients == {"key 0"}
        assert salts != {""}


def test_a_key_that_is_gone_ends_its_batches(tmp_path: Path, storage: StorageSection) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("[clients]\nalice = 'one-------------'\nbob = 'two-------------'\n")
    server = ServerSection(key_file=str(keys))
    with LiveServer(server=server, storage=storage) as live, connect(live, "one-------------") as client:
        batch = begin(client, line("a"), *(line(f"h{number}", prompt="!hang") for number in range(200)))
        wait_for_counts(client, batch, 1)
    keys.write_text("[clients]\nbob = 'two-------------'\n")
    with LiveServer(server=server, storage=storage) as live:
        database = f"file:{storage.folder}/store/index.sqlite3?mode=ro"

        def has_failed() -> bool:
            with closing(sqlite3.connect(database, uri=True)) as connection:
                return connection.execute("SELECT status FROM batches").fetchone() == ("failed",)

        assert live.wait_until(has_failed, 10)
    # A name may get another key: what it has stored is its own still.
    keys.write_text("[clients]\nalice = 'three-----------'\nbob = 'two-------------'\n")
    with LiveServer(server=server, storage=storage) as live, connect(live, "three-----------") as client:
        done = client.batches.retrieve(batch.id)
        assert (done.status, done.errors.data[0].code) == ("failed", "key_revoked")
        assert list(read(client, done.output_file_id)) == ["a"]


def test_lines_that_wait_are_not_run_for_a_key_that_is_gone(tmp_path: Path, storage: StorageSection) -> None:
    keys = tmp_path / "keys.toml"
    both = "[clients]\nalice = 'one-------------'\nbob = 'two-------------'\n"
    keys.write_text(both)
    slow = FakeIngress(delay_s=0.02)
    kept = ServerSection(key_file=str(keys))
    with LiveServer(slow, server=kept, storage=storage) as live, connect(live, "one-------------") as client:
        batch = begin(client, *(line(f"l{number}", prompt=f"p {number}") for number in range(500)))
        wait_for_counts(client, batch, 1)
        keys.write_text("[clients]\nbob = 'two-------------'\n")
        database = f"file:{storage.folder}/store/index.sqlite3?mode=ro"
        with closing(sqlite3.connect(database, uri=True)) as connection:
            deadline = time.monotonic() + far(20)
            while connection.execute("SELECT status FROM batches").fetchone() == ("in_progress",):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        time.sleep(1)  # until the file of keys may be looked at again
        keys.write_text(both)
        done = wait(client, batch)
        assert (done.status, done.errors.data[0].code) == ("failed", "key_revoked")
        assert len(read(client, done.output_file_id)) == done.request_counts.completed < 500


def test_the_next_server_goes_on_where_one_was_stopped(storage: StorageSection) -> None:
    lines = [line(f"l{number}", prompt=f"p {number}") for number in range(300)]
    slow = FakeIngress(delay_s=0.002)
    with LiveServer(slow, storage=storage) as server, connect(server) as client:
        batch = begin(client, *lines)
        wait_for_counts(client, batch, 20)
        began = {str(prompt): params.seed for prompt, params, _ in slow.asked}
    with LiveServer(storage=storage) as server, connect(server) as client:
        done = wait(client, batch)
        assert done.request_counts.completed == 300
        assert list(read(client, done.output_file_id)) == [f"l{number}" for number in range(300)]
        asked = server.ingress.asked
    again = {str(prompt): params.seed for prompt, params, _ in asked}
    assert len(asked) <= 280
    both = began.keys() & again.keys()
    assert both
    assert all(began[prompt] == again[prompt] for prompt in both)


def test_what_the_engine_has_no_room_for_is_tried_again(storage: StorageSection) -> None:
    limits = LimitsSection(max_requests=4, max_requests_per_client=2)
    with (
        LiveServer(FakeIngress(max_requests=2, delay_s=0.001), limits=limits, storage=storage) as server,
        connect(server) as client,
    ):
        done = wait(client, begin(client, *(line(f"l{number}") for number in range(20))))
        assert done.request_counts.completed == 20


def test_a_bug_over_one_line_is_that_lines_alone(client: openai.OpenAI) -> None:
    done = wait(client, begin(client, line("a"), line("bug", prompt="!bug")))
    assert done.status == "completed"
    error = read(client, done.error_file_id)["bug"]["response"]
    assert error["status_code"] == 500
    assert "secret" not in json.dumps(error)


def test_a_disk_that_is_full_holds_a_batch_up_and_loses_nothing(
    client: openai.OpenAI, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "TRY_AGAIN_S", 0.05)
    failing, original = [True], table_module.BatchTable._write

    def write(self: Any, *given: Any) -> Any:
        if failing[0]:
            raise OSError(28, "No space left on device")
        return original(self, *given)

    monkeypatch.setattr(table_module.BatchTable, "_write", write)
    batch = begin(client, line("a"), line("b"))
    wait(client, batch, "finalizing")
    time.sleep(0.3)
    assert client.batches.retrieve(batch.id).status == "finalizing"
    failing[0] = False
    done = wait(client, batch)
    assert list(read(client, done.output_file_id)) == ["a", "b"]


def test_an_owner_has_only_so_many_at_once(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unattended, "MOST_ACTIVE", 2)
    for _ in range(2):
        begin(client, line("a", prompt="!hang"))
    with pytest.raises(openai.RateLimitError, match="at most 2"):
        begin(client, line("a"))


def test_a_batch_does_not_use_its_clients_own_limits(storage: StorageSection) -> None:
    limits = LimitsSection(max_requests_per_client=1, requests_per_minute=3)
    with LiveServer(limits=limits, storage=storage) as server, connect(server) as client:
        batch = begin(client, line("a", prompt="!hang"))
        assert server.wait_until(lambda: server.ingress.num_open == 1, 5)
        client.completions.create(model=MODEL, prompt="x", max_tokens=2)
        client.batches.cancel(batch.id)
        wait(client, batch)
    assert unattended.ACCOUNT.format(client="x") != "x"


# ---- the disk --------------------------------------------------------------------------------


def small(storage: StorageSection) -> LiveServer:
    return LiveServer(storage=StorageSection(folder=storage.folder, quota_mb=1))


def test_a_batch_whose_answers_are_beyond_the_quota_fails_and_says_so(storage: StorageSection) -> None:
    with small(storage) as server, connect(server) as client:
        answers = [line(f"l{number}", n=64, max_tokens=8, logprobs=5) for number in range(20)]
        done = wait(client, begin(client, *answers))
        assert (done.status, done.errors.data[0].code) == ("failed", "storage_quota_exceeded")
        assert 0 < done.request_counts.completed < 20
        assert len(read(client, done.output_file_id)) == done.request_counts.completed
        assert {row["error"]["code"] for row in read(client, done.error_file_id).values()} == {"batch_failed"}
        folder = Path(storage.folder) / "store" / "contents"
        assert sum(path.stat().st_size for path in folder.iterdir()) <= 1 << 20


def test_batches_that_fail_at_once_fill_the_quota_and_no_more(storage: StorageSection) -> None:
    with small(storage) as server, connect(server) as client:
        metadata = {f"k{number}": "v" * 512 for number in range(16)}
        wrong = [line("c" * 500 + str(number), url="/" + "u" * 300) for number in range(100)]
        content = b"\n".join(json.dumps(one).encode() for one in wrong)
        file = client.files.create(file=content, purpose="batch")
        with pytest.raises(openai.BadRequestError, match=r"storage\.quota_mb"):
            for _ in range(500):
                made = client.batches.create(
                    input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h", metadata=metadata
                )
                wait(client, made)


def test_a_disk_that_stays_full_ends_a_batch_that_says_so(
    client: openai.OpenAI, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def write(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "TRY_AGAIN_S", 0.01)
    monkeypatch.setattr(store_module, "MOST_TRIES", 3)
    monkeypatch.setattr(table_module.BatchTable, "_write", write)
    done = wait(client, begin(client, line("a"), line("b")))
    assert (done.status, done.errors.data[0].code) == ("failed", "storage_full")
    assert (done.output_file_id, done.error_file_id) == (None, None)


def test_others_come_between_while_a_batch_ends(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    num_shares, original = [0], table_module.Store.run

    async def run(self: Any, work: Any, **more: Any) -> Any:
        num_shares[0] += work.__name__ == "share"
        return await original(self, work, **more)

    monkeypatch.setattr(table_module.Store, "run", run)
    monkeypatch.setattr(table_module, "LINES_AT_ONCE", 7)
    done = wait(client, begin(client, *(line(f"l{number}") for number in range(50))))
    assert done.request_counts.completed == 50
    assert list(read(client, done.output_file_id)) == [f"l{number}" for number in range(50)]
    assert num_shares[0] > 50 // 7
