"""Weights that change over HTTP: which places a request may name, in whose words, and what answers say."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.extensions.weight_updates.trainer import DEMO, PROMPT, choice, said
from tests.server.http_client import ask
from tests.server.live_system import MODEL, LiveSystem


def test_answers_name_the_version_that_a_trainer_has_given(live: LiveSystem) -> None:
    first = choice(live)
    assert "weight_versions" not in first
    status, answer = said(live, "POST", "/update_weights", {"path": "step-1", "version": "one"})
    assert (status, answer["weight_version"], answer["number"]) == (200, "one", 1)
    second = choice(live)
    assert second["weight_versions"] == [[0, "one"]]
    assert second["logprobs"] != first["logprobs"]
    native = {"input_ids": PROMPT["prompt"], "sampling_params": {"max_new_tokens": 2}}
    assert said(live, "POST", "/generate", native)[1]["meta_info"]["weight_version"] == "one"
    stream = ask(live.port, "POST", "/v1/completions", {**PROMPT, "stream": True})
    assert stream.body.count(b"weight_versions") == 1
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": True}
    assert b'"weight_versions":[[0,"one"]]' in ask(live.port, "POST", "/v1/chat/completions", chat).body
    status, answer = said(live, "POST", "/update_weights_from_disk", {"model_path": str(DEMO), "weight_version": "two"})
    assert (status, answer["success"]) == (200, True)
    assert said(live, "GET", "/get_weight_version")[1]["weight_version"] == "two"
    third = choice(live)
    assert (third["logprobs"], third["weight_versions"]) == (first["logprobs"], [[0, "two"]])


def test_a_file_of_some_tensors_changes_these_alone(live: LiveSystem, storage: Path) -> None:
    assert said(live, "POST", "/update_weights", {"path": "step-1", "version": "all"})[0] == 200
    expected = choice(live)["logprobs"]
    assert said(live, "POST", "/update_weights", {"path": str(DEMO)})[0] == 200
    tensors = load_file(storage / "weights" / "step-1" / "model.safetensors")
    halves = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
    for number, half in enumerate(halves):
        save_file(half, storage / "weights" / f"{number}.safetensors")
        assert said(live, "POST", "/update_weights", {"path": f"{number}.safetensors"})[0] == 200
        assert (choice(live)["logprobs"] == expected) == bool(number)
    save_file({"other": torch.zeros(1)}, storage / "weights" / "other.safetensors")
    status, answer = said(live, "POST", "/update_weights", {"path": "other.safetensors"})
    assert (status, "'other' is not among" in answer["error"]["message"]) == (400, True)
    name = next(iter(tensors))
    save_file({name: torch.zeros(1)}, storage / "weights" / "other.safetensors")
    status, answer = said(live, "POST", "/update_weights", {"path": "other.safetensors"})
    assert (status, "has shape" in answer["error"]["message"]) == (400, True)
    assert choice(live)["logprobs"] == expected


@pytest.mark.parametrize("path", ["/etc", "../../etc", "..", "step-2", "\0", "step-1/../.."])
def test_a_request_names_no_place_but_the_folder_of_weights(live: LiveSystem, path: str) -> None:
    before = said(live, "GET", "/weight_version")[1]["number"]
    status, answer = said(live, "POST", "/update_weights", {"path": path})
    assert status == 400
    assert ("below weights/" in answer["error"]["message"]) == (path != "step-2")
    assert said(live, "GET", "/weight_version")[1]["number"] == before


def test_weights_with_another_digest_or_in_pickles_are_refused(live: LiveSystem) -> None:
    status, answer = said(live, "POST", "/update_weights", {"path": "step-1", "digest": "0"})
    assert (status, answer["error"]["param"]) == (400, "digest")
    status, answer = said(live, "POST", "/update_weights_from_tensor", {"serialized_named_tensors": ["gAQu"]})
    assert status == 400
    assert "pickled" in answer["error"]["message"]
    status, answer = said(live, "POST", "/pause?mode=stop")
    assert (status, answer["error"]["param"]) == (400, "mode")


def test_a_limit_of_versions_is_a_small_number(live: LiveSystem) -> None:
    for most in (1 << 70, (1 << 31) + 1, -1):
        status, answer = said(live, "POST", "/update_weights", {"path": "step-1", "max_versions": most})
        assert (status, "max_versions" in answer["error"]["message"]) == (400, True)


def test_a_pause_has_the_words_of_vllm_and_of_sglang(live: LiveSystem) -> None:
    for pause, body, resume in (
        ("/pause?mode=keep", None, "/resume"),
        ("/pause_generation", {"mode": "in_place"}, "/continue_generation"),
    ):
        assert said(live, "POST", pause, body)[1]["is_paused"] is True
        assert said(live, "GET", "/is_paused")[1]["is_paused"] is True
        assert said(live, "GET", "/health")[0] == 200
        assert said(live, "POST", resume)[1]["is_paused"] is False
    assert len(choice(live)["text"]) > 0


def test_every_api_names_the_versions_and_so_does_an_explanation(live: LiveSystem) -> None:
    """Whole answers and the ends of streams."""
    messages = [{"role": "user", "content": "a"}]
    bodies: dict[str, dict[str, object]] = {
        "/v1/responses": {"model": MODEL, "input": "a", "max_output_tokens": 2},
        "/v1/messages": {"model": MODEL, "messages": messages, "max_tokens": 2},
        "/api/chat": {"model": MODEL, "messages": messages, "options": {"num_predict": 2}, "stream": False},
        "/api/generate": {"model": MODEL, "prompt": "a", "options": {"num_predict": 2}, "stream": False},
    }
    assert said(live, "POST", "/update_weights", {"path": "step-1", "version": "every"})[0] == 200
    named = b'"weight_versions":[[0,"every"]]'
    for path, body in bodies.items():
        whole = ask(live.port, "POST", path, body)
        assert (whole.status, whole.body.count(named)) == (200, 1), (path, whole.body)
        stream = ask(live.port, "POST", path, {**body, "stream": True})
        assert stream.body.count(named) == 1, (path, stream.body)
    reply = ask(
        live.port, "POST", "/v1/completions", {**PROMPT, "request_id": "explained"}, {"X-Request-Id": "explained"}
    )
    status, told = said(live, "GET", f"/explain/{reply.headers['x-request-id']}")
    assert (status, told["choices"][0]["weight_versions"]) == (200, [[0, "every"]])
