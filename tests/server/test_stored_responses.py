"""Stored and background responses with the official client."""

import time
from typing import Any

import openai
import pytest

from engine.features.sessions.planner import session_part
from engine.settings.sections import LimitsSection, ServerSection, StorageSection
from engine.types.errors import RequestError
from server.extensions.storage import unattended
from server.extensions.stored_responses.table import ResponseTable
from tests.pace import far
from tests.server.fake_ingress import FakeIngress, as_text
from tests.server.http_client import ask
from tests.server.live_server import MODEL, LiveServer, connect

CALL_TOOL: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}}
UNDER_WAY = ("queued", "in_progress")


def ask_for(client: openai.OpenAI, said: Any = "hello", **more: Any) -> Any:
    return client.responses.create(model=MODEL, input=said, **more)


def wait(client: openai.OpenAI, response: Any) -> Any:
    deadline = time.monotonic() + far(20)
    while (now := client.responses.retrieve(response.id)).status in UNDER_WAY:
        assert time.monotonic() < deadline, now
        time.sleep(0.01)
    return now


def test_a_response_can_be_asked_for_again_and_deleted(client: openai.OpenAI) -> None:
    made = ask_for(client, instructions="Be brief.", metadata={"a": "b"})
    assert made.store
    assert client.responses.retrieve(made.id) == made
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError) as caught:
            call(made.id)
        assert caught.value.code == "response_not_found"


def test_a_streamed_response_is_there_when_its_end_is_told(client: openai.OpenAI) -> None:
    for event in ask_for(client, stream=True):
        if event.type == "response.completed":
            assert client.responses.retrieve(event.response.id) == event.response
            break
    else:
        pytest.fail("the stream has no end")


def test_what_is_not_to_be_stored_is_not(client: openai.OpenAI) -> None:
    made = ask_for(client, store=False)
    assert not made.store
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_conversation_goes_on_from_a_response(client: openai.OpenAI, server: LiveServer) -> None:
    first = ask_for(client, "one", instructions="Be brief.")
    second = ask_for(client, [{"role": "user", "content": "two"}], previous_response_id=first.id, store=False)
    third = ask_for(client, "three", previous_response_id=first.id)
    ask_for(client, "four", previous_response_id=third.id, instructions="Be long.")
    assert second.previous_response_id == first.id
    sessions = [options.parts.get("sessions") for _, _, options in server.ingress.asked]
    assert sessions == [session_part(first.id)] * 4, "it begins with the first response, and forks are one session"
    ask_for(client, "alone", store=False)
    assert "sessions" not in server.ingress.asked[-1][2].parts, "nothing can go on from it"
    ask_for(client, previous_response_id=first.id, prompt_cache_key="k")
    assert server.ingress.asked[-1][2].parts["sessions"] == session_part("k")
    prompts = [as_text(prompt) for prompt, _, _ in server.ingress.asked]
    said = [f"assistant: {one.output_text}" for one in (first, third)]
    assert prompts[1] == "\n".join(["user: one", said[0], "user: two"])
    assert prompts[3] == "\n".join(["system: Be long.", "user: one", said[0], "user: three", said[1], "user: four"])
    with pytest.raises(openai.NotFoundError) as caught:
        ask_for(client, previous_response_id=second.id)
    assert (caught.value.code, caught.value.param) == ("response_not_found", "previous_response_id")


def test_calls_are_gone_on_from(client: openai.OpenAI, server: LiveServer) -> None:
    called = ask_for(client, "!call", tools=[CALL_TOOL])
    (call,) = (item for item in called.output if item.type == "function_call")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "seen"}
    ask_for(client, [output], previous_response_id=called.id, tools=[CALL_TOOL])
    turns = server.ingress.asked[-1][0]
    assert [turn.role for turn in turns] == ["user", "assistant", "tool"]
    assert turns[1].tool_calls[0].name == "look"
    assert (turns[2].content, turns[2].tool_call_id) == ("seen", call.call_id)


def test_thoughts_are_gone_on_from(client: openai.OpenAI, server: LiveServer) -> None:
    ask_for(client, "more", previous_response_id=ask_for(client, "!think").id)
    assert [bool(turn.reasoning) for turn in server.ingress.asked[-1][0]] == [False, True, False]


def test_a_conversation_whose_middle_was_deleted_is_said_to_be_so(client: openai.OpenAI) -> None:
    first = ask_for(client)
    second = ask_for(client, previous_response_id=first.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=first.id):
        ask_for(client, previous_response_id=second.id)


def test_input_items_are_listed(client: openai.OpenAI) -> None:
    items: Any = [{"role": "user", "content": f"item {number}"} for number in range(5)]
    made = ask_for(client, items)
    listed = list(client.responses.input_items.list(made.id, limit=2, order="asc"))
    assert [one.content[0].text for one in listed] == [f"item {number}" for number in range(5)]
    assert len({one.id for one in listed}) == 5
    assert [one.id for one in client.responses.input_items.list(made.id)] == [one.id for one in listed][::-1]
    with pytest.raises(openai.BadRequestError, match="after"):
        client.responses.input_items.list(made.id, after="msg_x")


def test_a_response_is_made_in_the_background(client: openai.OpenAI, server: LiveServer) -> None:
    queued = ask_for(client, background=True, extra_body={"seed": 5})
    assert (queued.status, queued.output, queued.background) == ("queued", [], True)
    done = wait(client, queued)
    assert done.status == "completed"
    assert done.created_at == queued.created_at
    assert done.output_text == ask_for(client, extra_body={"seed": 5}).output_text
    assert ask_for(client, "more", previous_response_id=done.id).status == "completed"


def test_a_background_response_that_fails_says_why(
    client: openai.OpenAI, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = wait(client, ask_for(client, "x" * 9000, background=True))
    assert (done.status, done.error.code, done.output) == ("failed", "context_length_exceeded", [])

    def bug(*_: object) -> None:
        raise RuntimeError("in /secret/path.py")

    monkeypatch.setattr(server.ingress, "open", bug)
    done = wait(client, ask_for(client, background=True))
    assert (done.status, done.error.code) == ("failed", "internal_error")
    assert "secret" not in done.to_json()


def test_a_background_response_is_cancelled_once(server: LiveServer, client: openai.OpenAI) -> None:
    server.ingress.delay_s = 30.0
    queued = ask_for(client, background=True)
    assert server.wait_until(lambda: server.ingress.num_open == 1, 5)
    assert client.responses.retrieve(queued.id).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="only a whole response"):
        ask_for(client, previous_response_id=queued.id)
    assert client.responses.cancel(queued.id).status == "cancelled"
    assert server.wait_until(lambda: server.ingress.num_open == 0, 5)
    assert client.responses.cancel(queued.id).status == "cancelled"
    assert client.responses.retrieve(queued.id).status == "cancelled"


def test_deleting_a_background_response_ends_it(server: LiveServer, client: openai.OpenAI) -> None:
    server.ingress.delay_s = 30.0
    queued = ask_for(client, background=True)
    assert server.wait_until(lambda: server.ingress.num_open == 1, 5)
    client.responses.delete(queued.id)
    assert server.wait_until(lambda: server.ingress.num_open == 0, 5)


def test_only_background_responses_can_be_cancelled(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="only a response with background=true"):
        client.responses.cancel(ask_for(client).id)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"stream": True}, "stream"), ({"store": False}, "store"), ({"temperature": -1}, "temperature")],
)
def test_what_no_background_response_can_be_is_refused(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask_for(client, background=True, **fields)
    assert caught.value.param == param


def test_the_next_server_makes_what_one_has_left_and_the_same(storage: StorageSection) -> None:
    with LiveServer(FakeIngress(delay_s=30.0), storage=storage) as server, connect(server) as client:
        queued = [ask_for(client, f"say {number}", background=True) for number in range(5)]
        assert server.wait_until(lambda: server.ingress.num_open == 5, 5)
        seeds = {as_text(prompt): params.seed for prompt, params, _ in server.ingress.asked}
    with LiveServer(storage=storage) as server, connect(server) as client:
        done = [wait(client, one) for one in queued]
        assert {one.status for one in done} == {"completed"}
        assert [one.created_at for one in done] == [one.created_at for one in queued]
        assert {as_text(prompt): params.seed for prompt, params, _ in server.ingress.asked} == seeds
        assert None not in seeds.values()


def test_what_the_engine_has_no_room_for_waits(storage: StorageSection) -> None:
    limits = LimitsSection(max_requests_per_client=2)
    with LiveServer(limits=limits, storage=storage) as server, connect(server) as client:
        queued = [ask_for(client, background=True) for _ in range(6)]
        assert {wait(client, one).status for one in queued} == {"completed"}


def test_another_keys_responses_are_not_there(storage: StorageSection) -> None:
    with (
        LiveServer(server=ServerSection(api_key=["one", "two"]), storage=storage) as server,
        connect(server, "one") as client,
        connect(server, "two") as other,
    ):
        made, queued = ask_for(client), ask_for(client, background=True)
        for response in (made, queued):
            for call in (other.responses.retrieve, other.responses.delete, other.responses.cancel):
                with pytest.raises(openai.NotFoundError):
                    call(response.id)
            with pytest.raises(openai.NotFoundError):
                other.responses.input_items.list(response.id)
            with pytest.raises(openai.NotFoundError):
                ask_for(other, previous_response_id=response.id)
        assert wait(client, queued).status == "completed"


def test_a_place_in_a_list_of_keys_is_nobodys_name(storage: StorageSection) -> None:
    with LiveServer(server=ServerSection(api_key=["one", "two"]), storage=storage) as server:
        made = ask_for(connect(server, "one"))
    only_two = ServerSection(api_key=["two"])
    with LiveServer(server=only_two, storage=storage) as server, pytest.raises(openai.NotFoundError):
        connect(server, "two").responses.retrieve(made.id)


def test_with_a_full_disk_answers_come_unstored_unless_they_were_asked_to_be_stored(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: object, **__: object) -> None:
        raise RequestError("the server's disk is full; nothing was stored", status=507, code="storage_full")

    monkeypatch.setattr(ResponseTable, "add", full)
    told = client.responses.with_raw_response.create(model=MODEL, input="hello")
    assert "not stored" in told.headers["Warning"]
    made = told.parse()
    assert (made.status, made.store, bool(made.output_text)) == ("completed", False, True)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    last = list(ask_for(client, stream=True))[-1]
    assert (last.type, last.response.store) == ("response.completed", False)
    assert ask_for(client, store=False).status == "completed"
    for asked in ({"store": True}, {"background": True}):
        with pytest.raises(openai.InternalServerError) as caught:
            ask_for(client, **asked)
        assert caught.value.code == "storage_full"
    last = list(ask_for(client, stream=True, store=True))[-1]
    assert (last.type, last.response.error.code) == ("response.failed", "storage_full")


def test_a_quota_is_said_before_anything_is_made(storage: StorageSection) -> None:
    small = StorageSection(folder=storage.folder, quota_mb=1)
    with LiveServer(storage=small) as server, connect(server) as client:
        with pytest.raises(openai.BadRequestError, match=r"storage\.quota_mb"):
            for _ in range(1000):
                ask_for(client, "x" * 8000)
        num_asked = len(server.ingress.asked)
        assert num_asked > 10
        with pytest.raises(openai.BadRequestError):
            ask_for(client, "x" * 8000, background=True)
        assert len(server.ingress.asked) == num_asked
        assert ask_for(client, "x" * 8000, store=False).status == "completed"


def test_events_are_not_stored(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="events are not stored"):
        client.responses.retrieve(ask_for(client).id, stream=True)


def test_without_a_folder_store_is_taken_and_nothing_is_stored(live: LiveServer) -> None:
    with connect(live) as client:
        made = ask_for(client, store=True)
        assert not made.store
        with pytest.raises(openai.NotFoundError, match=r"storage\.folder"):
            client.responses.retrieve(made.id)
        for fields in ({"background": True}, {"previous_response_id": made.id}):
            with pytest.raises(openai.BadRequestError, match=r"storage\.folder"):
                ask_for(client, **fields)
    assert ask(live.port, "POST", "/v1/responses", {"model": MODEL, "input": "x", "store": 3}).status == 400


def test_background_responses_are_counted_and_only_so_many_wait(
    storage: StorageSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unattended, "MOST_ACTIVE", 2)
    server, limits = ServerSection(api_key=["one", "two"]), LimitsSection(requests_per_minute=4)
    with (
        LiveServer(FakeIngress(delay_s=30.0), server=server, limits=limits, storage=storage) as live,
        connect(live, "one") as client,
        connect(live, "two") as other,
    ):
        for code in ("", "", "too_many_responses", "too_many_responses", "rate_limit_exceeded"):
            if not code:
                ask_for(client, background=True)
                continue
            with pytest.raises(openai.RateLimitError) as caught:
                ask_for(client, background=True)
            assert caught.value.code == code
            assert int(caught.value.response.headers["retry-after"]) >= 1
        queued = ask_for(other, background=True)
        other.responses.cancel(queued.id)
        ask_for(other, background=True)


@pytest.mark.parametrize("restarts", [False, True])
def test_background_responses_come_after_live_requests_and_by_turns_of_their_owners(
    storage: StorageSection, restarts: bool
) -> None:
    server, slow = ServerSection(api_key=["one", "two"]), FakeIngress(delay_s=30.0)
    with LiveServer(slow, server=server, storage=storage) as live, connect(live, "one") as client:
        for number in range(70):
            ask_for(client, f"one {number}", background=True)
        with connect(live, "two") as other:
            queued = ask_for(other, "two", background=True)
            assert live.wait_until(lambda: live.ingress.num_open == 48, 5)
            if not restarts:
                live.ingress.delay_s = 0.0
                live.call(lambda: [live.ingress.abort(stream.request_id) for stream in live.ingress.opened])
                wait(other, queued)
                check_turns(live.ingress)
    if restarts:
        with LiveServer(server=server, storage=storage) as live, connect(live, "two") as other:
            wait(other, queued)
            check_turns(live.ingress)


def check_turns(ingress: FakeIngress) -> None:
    said = [as_text(prompt) for prompt, _, _ in ingress.asked]
    assert said.index("user: two") < 60, "another owner's are not all before it"
    assert {options.priority for _, _, options in ingress.asked} == {unattended.LAST_PRIORITY}


def test_an_answer_that_is_beyond_the_quota_is_told_or_has_failed(storage: StorageSection) -> None:
    small = StorageSection(folder=storage.folder, quota_mb=1)
    long: Any = {"max_output_tokens": 2000, "extra_body": {"ignore_eos": True}}
    with LiveServer(storage=small) as server, connect(server) as client:
        client.files.create(file=b"x" * ((1 << 20) - 5000), purpose="batch")
        made = ask_for(client, **long)
        assert (made.status, made.store, len(made.output_text) > 5000) == ("incomplete", False, True)
        done = wait(client, ask_for(client, background=True, **long))
        assert (done.status, done.error.code) == ("failed", "storage_quota_exceeded")
        with pytest.raises(openai.BadRequestError, match=r"storage\.quota_mb"):
            ask_for(client, store=True, **long)
