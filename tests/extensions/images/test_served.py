"""A tiny model that sees, asked by HTTP: every API gives its answer, and counts a picture as the engine does."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from callboard import LLM, SamplingParams
from tests.extensions.images.pictures import data_uri
from tests.extensions.images.test_videos import moving
from tests.features.images import made
from tests.server.engine_server import EngineServer
from tests.server.http_client import ask

PICTURE = made.picture(50, 31)
GREEDY: dict[str, Any] = {"model": "eye", "max_tokens": 8, "temperature": 0}


def post(server: EngineServer, path: str, **body: Any) -> Any:
    reply = ask(server.port, "POST", path, body)
    assert reply.status == 200, reply.body
    return reply.json


def chat(server: EngineServer, picture: bytes) -> Any:
    parts = [{"type": "image_url", "image_url": {"url": data_uri(picture)}}, {"type": "text", "text": "What?"}]
    return post(server, "/v1/chat/completions", messages=[{"role": "user", "content": parts}], **GREEDY)


@pytest.mark.slow
def test_a_model_that_sees_is_asked_in_every_api(tmp_path: Path) -> None:
    model = {"path": str(made.make("llava", tmp_path / "eye")), "name": "eye", "dtype": "float32"}
    with EngineServer(model=model, kv={"page_size": 4, "num_pages": 400}) as server:
        assert ask(server.port, "GET", "/model_info").json["has_image_understanding"]
        first = chat(server, PICTURE)
        text = first["choices"][0]["message"]["content"]
        num_tokens = first["usage"]["prompt_tokens"]
        assert num_tokens > 16  # of the picture alone

        block = {"type": "image", "source": {"type": "base64", "data": base64.b64encode(PICTURE).decode()}}
        messages = [{"role": "user", "content": [block, {"type": "text", "text": "What?"}]}]
        assert post(server, "/v1/messages/count_tokens", model="eye", messages=messages)["input_tokens"] == num_tokens
        answer = post(server, "/v1/messages", messages=messages, **GREEDY)
        assert answer["content"][0]["text"] == text
        assert 0 < answer["usage"]["input_tokens"] == num_tokens - answer["usage"]["cache_read_input_tokens"]

        parts = [{"type": "input_image", "image_url": data_uri(PICTURE)}, {"type": "input_text", "text": "What?"}]
        body = {"model": "eye", "input": [{"role": "user", "content": parts}], "temperature": 0, "max_output_tokens": 8}
        assert post(server, "/v1/responses", **body)["output"][0]["content"][0]["text"] == text
        told = {"role": "user", "content": "What?", "images": [block["source"]["data"]]}  # type: ignore[index]
        options = {"num_predict": 8, "temperature": 0}
        lines = post(server, "/api/chat", model="eye", messages=[told], stream=False, options=options)
        assert lines["message"]["content"] == text

        assert chat(server, made.picture(50, 31, seed=1))["usage"]["prompt_tokens"] == num_tokens
        assert chat(server, PICTURE)["choices"] == first["choices"]


@pytest.mark.slow
def test_a_video_is_answered_as_in_python_and_twice_for_two_choices(tmp_path: Path) -> None:
    directory = made.make("qwen3_vl", tmp_path / "eye")
    settings = {"size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 60}, "patch_size": 14}
    (directory / "video_preprocessor_config.json").write_text(json.dumps(settings))
    film = moving(size=(56, 64))
    parts: list[dict[str, Any]] = [{"type": "text", "text": "See:"}, {"type": "video", "video": film}]
    with LLM(directory, progress=False, config={"model": {"dtype": "float32"}}) as llm:
        (expected,) = llm.chat([{"role": "user", "content": parts}], SamplingParams(temperature=0.0, max_tokens=8))
    parts[1] = {"type": "video_url", "video_url": {"url": data_uri(film, "image/gif")}}
    model = {"path": str(directory), "name": "eye", "dtype": "float32"}
    with EngineServer(model=model, kv={"page_size": 4, "num_pages": 400}) as server:
        messages = [{"role": "user", "content": parts}]
        answer = post(server, "/v1/chat/completions", messages=messages, n=2, **GREEDY)
        assert [choice["message"]["content"] for choice in answer["choices"]] == [expected.text] * 2
        assert answer["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
