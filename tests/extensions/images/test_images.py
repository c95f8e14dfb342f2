"""Pictures in every API: the engine gets them with their places, as they came, checked and turned upright."""

import base64
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
from PIL import Image

from engine.settings.sections import ServerSection, StorageSection
from engine.types.prompt import ChatTurn, Picture
from server.extensions.images import decoders, sight
from tests.extensions.images.pictures import data_uri, picture, seeing
from tests.server.http_client import Reply, ask
from tests.server.live_server import MODEL, LiveServer, connect

PNG = picture()
BASE64 = base64.b64encode(PNG).decode()
URI = data_uri(PNG, "image/png")
SEEN = Picture(PNG, hashlib.sha256(PNG).hexdigest(), 12, 8)
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with seeing() as server:
        yield server


def post(live: LiveServer, path: str, **body: Any) -> Reply:
    return ask(live.port, "POST", path, {"model": MODEL, "max_tokens": 2, **body})


def post_chat(live: LiveServer, *parts: Any, **body: Any) -> Reply:
    return post(live, CHAT, messages=[{"role": "user", "content": list(parts)}], **body)


def asked(live: LiveServer) -> tuple[ChatTurn, ...]:
    """The conversation that the engine got last."""
    prompt: Any = live.call(lambda: live.ingress.asked[-1][0])
    return prompt


def text(given: str) -> dict[str, str]:
    return {"type": "text", "text": given}


def image(url: Any = URI) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_chat_keeps_the_places_of_pictures(live: LiveServer) -> None:
    parts = [text("Compare "), image(), text(" and "), image(), image(URI.replace("image/png", "image/PNG"))]
    assert post_chat(live, *parts).status == 200
    assert asked(live) == (ChatTurn("user", "Compare  and ", pictures=(SEEN,) * 3, places=(8, 13, 13)),)


def test_detail_and_addresses_as_text(live: LiveServer) -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": URI, "detail": "low"}},
        {"type": "image_url", "image_url": URI},
        {"type": "input_image", "image_url": URI, "detail": "original"},
    ]
    assert post_chat(live, *parts).status == 200
    assert [one.detail for one in asked(live)[0].pictures] == ["low", "auto", "high"]


def test_responses(live: LiveServer) -> None:
    items = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Look: "}, {"type": "input_image", "image_url": URI}],
        },
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": [{"type": "input_text", "text": "seen"}, {"type": "input_image", "image_url": URI}],
        },
    ]
    assert ask(live.port, "POST", "/v1/responses", {"model": MODEL, "input": items}).status == 200
    user, _, result = asked(live)
    assert user == ChatTurn("user", "Look: ", pictures=(SEEN,), places=(6,))
    assert result == ChatTurn("tool", "seen", tool_call_id="call_1", pictures=(SEEN,), places=(4,))


def test_anthropics_blocks_and_results(live: LiveServer) -> None:
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}}
    messages = [
        {"role": "user", "content": [text("one"), text("two"), block, text("three")]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [text("four"), block, text("five"), text("six")],
                },
                block,
                text("seven"),
            ],
        },
    ]
    assert post(live, "/v1/messages", messages=messages).status == 200
    user, _, result, last = asked(live)
    assert user == ChatTurn("user", "one\ntwothree", pictures=(SEEN,), places=(7,))
    assert result == ChatTurn("tool", "fourfive\nsix", tool_call_id="t1", pictures=(SEEN,), places=(4,))
    assert last == ChatTurn("user", "seven", pictures=(SEEN,), places=(0,))


def test_ollama(live: LiveServer) -> None:
    assert post(live, "/api/chat", messages=[{"role": "user", "content": "What?", "images": [BASE64]}]).status == 200
    expected = (ChatTurn("user", "What?", pictures=(SEEN,), places=(0,)),)
    assert asked(live) == expected
    assert post(live, "/api/generate", prompt="What?", images=[BASE64]).status == 200
    assert asked(live) == expected


def test_pictures_of_a_tool_and_of_the_past_are_seen(live: LiveServer) -> None:
    messages = [
        {"role": "user", "content": [image()]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": [image(), text("done")]},
        {"role": "user", "content": "And now?"},
    ]
    assert post(live, CHAT, messages=messages).status == 200
    assert [len(turn.pictures) for turn in asked(live)] == [1, 0, 1, 0]


def test_a_picture_is_turned_upright_and_decoded_once(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    turned = picture("JPEG", (24, 16), exif=exif)
    assert post_chat(live, image(data_uri(turned))).status == 200
    (one,) = asked(live)[0].pictures
    assert (one.data, one.width, one.height) == (turned, 16, 24)

    async def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(decoders.Decoders, "judge", never)
    assert post_chat(live, image(data_uri(turned))).status == 200


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("data:image/png;base64,%%%", "not valid base64"),
        ("data:image/png,abc", "must begin with 'data:image/TYPE;base64,'"),
        (data_uri(PNG, "image/webp"), "declared as image/webp, but it is image/png"),
        ("https://example.org/a.png", "fetches pictures from no host (server.media_hosts)"),
        ("file:///etc/passwd", "neither a data URI nor an address"),
        ("", "neither a data URI nor an address"),
        (None, "required as text"),
        (data_uri(picture("JPEG", (16, 16), "CMYK")), "4 channels"),
    ],
)
def test_what_is_wrong_is_said_by_the_fields_name(live: LiveServer, url: Any, said: str) -> None:
    reply = post_chat(live, text("?"), image(url))
    assert reply.status == 400
    assert reply.error["message"].startswith("messages[0].content[1].image_url.url: ")
    assert said in reply.error["message"]


def test_limits_of_a_request(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = post_chat(live, *[image()] * (sight.MAX_PICTURES + 1))
    assert (reply.status, reply.error["code"]) == (400, "too_many_images")
    monkeypatch.setattr(sight, "MAX_REQUEST_PIXELS", 150)
    reply = post_chat(live, image(), image())
    assert (reply.status, "at most 150 are allowed" in reply.error["message"]) == (400, True)


def test_a_process_that_ends_or_hangs_costs_its_picture_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with seeing() as live:
        monkeypatch.setattr(decoders, "COMMAND", ("false",))
        assert "ended the process" in post_chat(live, image()).error["message"]
        monkeypatch.setattr(decoders, "COMMAND", ("sleep", "60"))
        monkeypatch.setattr(decoders, "DECODE_TIMEOUT_S", 0.1)
        assert "takes longer than 0.1 s" in post_chat(live, image()).error["message"]
        monkeypatch.undo()
        assert post_chat(live, image()).status == 200


def test_without_pillow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    said = msgspec.json.encode({"problem": "not installed"}).decode()
    monkeypatch.setattr(decoders, "COMMAND", ("sh", "-c", f"echo '{said}'; exec sleep 60"))
    with seeing() as live:
        reply = post_chat(live, image())
    assert (reply.status, reply.error["code"]) == (501, "images_not_installed")
    assert "callboard[images]" in reply.error["message"]


def test_uploaded_files(storage: StorageSection) -> None:
    server = ServerSection(api_key=["one-key-of-some-length", "another-key-of-some-length"])
    with seeing(server=server, storage=storage) as live, connect(live, "one-key-of-some-length") as client:
        file = client.files.create(file=("a.png", PNG), purpose="vision")
        part: Any = {"type": "input_image", "file_id": file.id, "detail": "high"}
        client.responses.create(model=MODEL, input=[{"role": "user", "content": [part]}])
        assert asked(live)[0].pictures == (msgspec.structs.replace(SEEN, detail="high"),)
        with connect(live, "another-key-of-some-length") as other, pytest.raises(openai.NotFoundError):
            other.responses.create(model=MODEL, input=[{"role": "user", "content": [part]}])


def test_lines_of_batches(storage: StorageSection) -> None:
    body = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": [image()]}]}
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body}
    with seeing(storage=storage) as live, connect(live) as client:
        file = client.files.create(file=json.dumps(line).encode(), purpose="batch")
        client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        assert live.wait_until(lambda: bool(live.ingress.asked), 10)
        assert asked(live)[0].pictures == (SEEN,)


def test_a_stored_conversation_keeps_its_picture(storage: StorageSection) -> None:
    with seeing(storage=storage) as live, connect(live) as client:
        part: Any = {"type": "input_image", "image_url": URI, "detail": "auto"}
        first = client.responses.create(model=MODEL, input=[{"role": "user", "content": [part]}])
        client.responses.create(model=MODEL, input="And now?", previous_response_id=first.id)
        assert asked(live)[0].pictures == (SEEN,)


def test_a_picture_is_counted_before_a_request_is_sent(live: LiveServer) -> None:
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": [block]}]}
    reply = ask(live.port, "POST", "/v1/messages/count_tokens", body)
    assert (reply.status, "not a picture of a known format" in reply.error["message"]) == (400, True)
