"""The requests that trainers' clients send, as their packages build them: verl, slime, TRL; and tensors in bodies.

verl 0.9.1: ``workers/rollout/sglang_rollout/http_server_engine.py``.  TRL 1.16: ``generation/vllm_client.py`` and
``experimental/async_grpo``.  slime: ``backends/sglang_utils/sglang_engine.py``.  OpenRLHF 0.11 calls vLLM's Python.
"""

import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from tests.extensions.weight_updates.trainer import DEMO, PROMPT, choice, said
from tests.server.http_client import ask
from tests.server.live_system import MODEL, LiveSystem

NAME = "model.norm.weight"
BYTES = {"Content-Type": "application/octet-stream"}


@pytest.fixture
def norm() -> torch.Tensor:
    return load_file(DEMO / "model.safetensors")[NAME]


@pytest.fixture(autouse=True)
def first_weights(live: LiveSystem) -> Iterator[None]:
    """The weights that the server began with, before and after each test."""
    yield
    for path in ("/continue_generation", "/wake_up"):
        assert said(live, "POST", path, {})[0] == 200
    assert said(live, "POST", "/update_weights", {"path": str(DEMO)})[0] == 200


def info_of(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The ``update_info`` of vLLM's clients, without a place."""
    return {
        "names": [*tensors],
        "dtype_names": [str(one.dtype).removeprefix("torch.") for one in tensors.values()],
        "shapes": [[*one.shape] for one in tensors.values()],
    }


def data_of(tensors: dict[str, torch.Tensor]) -> str:
    return base64.b64encode(b"".join(one.view(torch.uint8).numpy().tobytes() for one in tensors.values())).decode()


def test_what_trl_sends_changes_all_tensors_at_once(live: LiveSystem, norm: torch.Tensor) -> None:
    before = choice(live)["logprobs"]
    assert said(live, "GET", "/get_world_size")[1] == {"world_size": 1}
    assert said(live, "POST", "/init_weight_transfer_engine", {"init_info": {}})[0] == 200
    assert said(live, "POST", "/pause?mode=keep", {})[0] == 200
    assert said(live, "POST", "/resume", {})[0] == 200
    number = said(live, "GET", "/weight_version")[1]["number"]
    assert said(live, "POST", "/start_weight_update", {})[0] == 200
    for factor in (3, 2):
        tensors = {NAME: norm * factor}
        body = {"update_info": {**info_of(tensors), "packed": True, "data": data_of(tensors)}}
        assert said(live, "POST", "/update_weights", body)[1]["number"] == number
        assert choice(live)["logprobs"] == before
    assert said(live, "POST", "/finish_weight_update", {"weight_version": "step-2"})[0] == 200
    assert said(live, "POST", "/reset_prefix_cache", {})[0] == 200
    assert said(live, "GET", "/weight_info")[1]["weight_version"] == "step-2"
    changed = choice(live)
    assert changed["weight_versions"] == [[0, "step-2"]]
    assert changed["logprobs"] != before
    assert (
        said(live, "POST", "/update_weights", {"update_info": {**info_of(tensors), "data": data_of(tensors)}})[0] == 200
    )
    assert choice(live)["logprobs"] == changed["logprobs"]


def test_what_trl_asks_for_is_generated(live: LiveSystem) -> None:
    body = {
        "model": MODEL, "prompt": [[5, 6, 7], [8, 9]], "return_token_ids": True, "return_tokens_as_token_ids": True,
        "n": 2, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 4,
        "logprobs": 0,
    }  # fmt: skip
    status, answer = said(live, "POST", "/v1/completions", body)
    assert status == 200
    assert [one["prompt_token_ids"] for one in answer["choices"][::2]] == body["prompt"]
    for one in answer["choices"]:
        drawn = [int(token.removeprefix("token_id:")) for token in one["logprobs"]["tokens"]]
        assert drawn == one["token_ids"]
        assert len(one["logprobs"]["token_logprobs"]) == len(drawn)


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/init_weight_transfer_engine", {"init_info": {"master_address": "1.2.3.4", "world_size": 2}}, "NCCL"),
        (
            "/update_weights",
            {"update_info": {"names": [NAME], "dtype_names": ["float32"], "shapes": [[1]]}},
            "no place",
        ),
        ("/update_weights", {"update_info": {"names": [NAME], "dtype_names": [], "shapes": []}}, "one entry for each"),
        ("/update_weights", {"update_info": {"names": ["a"], "dtype_names": ["x"], "shapes": [[1]]}}, "not 'x'"),
        (
            "/update_weights",
            {"update_info": {"names": [NAME], "dtype_names": ["float32"], "shapes": [[2]], "data": "AAAA"}},
            "has 3 bytes",
        ),
        (
            "/update_weights",
            {"update_info": {"names": [NAME], "dtype_names": ["float32"], "shapes": [[1]], "data": "??"}},
            "base64",
        ),
        (
            "/update_weights",
            {"update_info": {"names": [NAME], "dtype_names": ["float32"], "shapes": [[1]], "data": "AAAAAA=="}},
            "has shape",
        ),
        (
            "/update_weights",
            {"update_info": {"names": [NAME], "dtype_names": ["float32"], "shapes": [[1 << 40] * 64], "data": ""}},
            "has 0 bytes",
        ),
        ("/update_weights", {}, "required"),
        ("/finish_weight_update", {}, "no update has begun"),
        ("/release_memory_occupation", {"tags": ["other"]}, "other"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": []}, "one entry"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["e30="]}, "pickled"),
        ("/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}, "NCCL"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_and_changes_nothing(
    live: LiveSystem, path: str, body: dict[str, Any], why: str
) -> None:
    before = said(live, "GET", "/weight_version")[1]
    status, answer = said(live, "POST", path, body)
    assert (status, why in answer["error"]["message"]) == (400, True), answer
    assert said(live, "GET", "/weight_version")[1] == {**before, "took_s": pytest.approx(0, abs=1)}


def test_what_verl_sends_to_sglang(live: LiveSystem, norm: torch.Tensor) -> None:
    before = choice(live)["logprobs"]
    assert said(live, "GET", "/flush_cache")[0] == 200
    assert said(live, "POST", "/release_memory_occupation", {"tags": ["kv_cache", "weights"]})[1]["released"] == [
        "kv_cache", "weights"
    ]  # fmt: skip
    assert said(live, "GET", "/is_sleeping")[1] == {"is_sleeping": True}
    assert said(live, "POST", "/resume_memory_occupation", {"tags": ["weights"]})[1]["released"] == ["kv_cache"]
    packed = base64.b64encode(save({NAME: norm * 2})).decode()
    body = {"serialized_named_tensors": [packed], "load_format": None, "flush_cache": False}
    assert said(live, "POST", "/update_weights_from_tensor", body)[1]["success"] is True
    assert said(live, "POST", "/resume_memory_occupation", {"tags": ["kv_cache"]})[1]["released"] == []
    assert said(live, "GET", "/flush_cache")[0] == 200
    assert choice(live)["logprobs"] != before
    pickled = base64.b64encode(b"\x80\x04]\x94.").decode()  # an empty list
    status, answer = said(live, "POST", "/update_weights_from_tensor", {**body, "serialized_named_tensors": [pickled]})
    assert (status, "pickled" in answer["error"]["message"]) == (400, True)
    assert said(live, "POST", "/abort_request", {"rid": "", "abort_all": True})[0] == 200


def test_what_slime_sends(live: LiveSystem) -> None:
    assert ask(live.port, "GET", "/health_generate").status == 200
    assert said(live, "POST", "/pause_generation", {})[1]["is_paused"] is True
    body = {"model_path": "step-1", "load_format": None, "flush_cache": False, "weight_version": "7"}
    assert said(live, "POST", "/update_weights_from_disk", body)[1]["success"] is True
    assert said(live, "POST", "/continue_generation", {})[1]["is_paused"] is False
    assert said(live, "GET", "/get_weight_version")[1]["weight_version"] == "7"
    assert said(live, "POST", "/release_memory_occupation", {})[1]["released"] == ["kv_cache", "weights"]
    assert said(live, "POST", "/resume_memory_occupation", {"tags": None})[1]["released"] == []
    native = {"input_ids": PROMPT["prompt"], "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
    assert said(live, "POST", "/generate", native)[1]["meta_info"]["weight_version"] == "7"


def test_memory_by_tags_has_vllms_words(live: LiveSystem) -> None:
    before = choice(live)["logprobs"]
    assert said(live, "POST", "/sleep?tags=weights&tags=kv_cache")[1] == {"is_sleeping": True}
    assert said(live, "POST", "/wake_up?tags=weights")[1] == {"is_sleeping": True}
    assert said(live, "POST", "/wake_up?tags=kv_cache")[1] == {"is_sleeping": False}
    assert choice(live)["logprobs"] == before
    assert said(live, "POST", "/sleep?level=2")[1] == {"is_sleeping": True}
    assert said(live, "POST", "/wake_up?tags=weights")[1] == {"is_sleeping": True}
    assert said(live, "POST", "/update_weights", {"path": "step-1", "version": "asleep"})[0] == 200
    assert said(live, "POST", "/wake_up?tags=kv_cache")[1] == {"is_sleeping": False}
    assert choice(live)["weight_versions"] == [[0, "asleep"]]
    assert said(live, "POST", "/sleep?tags=other")[0] == 400


def test_a_file_of_tensors_is_a_body(live: LiveSystem, norm: torch.Tensor) -> None:
    before, content = choice(live)["logprobs"], save({NAME: norm * 2})
    digest = hashlib.sha256(content).hexdigest()
    for query, status in (("digest=0", 400), ("path=x", 400), ("mode=other", 400), ("max_versions=-1", 400)):
        assert ask(live.port, "POST", f"/update_weights?{query}", content, BYTES).status == status
    assert choice(live)["logprobs"] == before
    reply = ask(live.port, "POST", f"/update_weights?version=body&digest={digest}", content, BYTES)
    assert (reply.status, reply.json["weight_version"]) == (200, "body")
    assert choice(live)["logprobs"] != before
    assert ask(live.port, "POST", "/update_weights", content[:-1], BYTES).status == 400
    assert ask(live.port, "POST", "/update_weights", b"", BYTES).status == 400
    assert ask(live.port, "POST", "/update_weights", content, {**BYTES, "Sec-Fetch-Site": "cross-site"}).status == 403
    assert choice(live)["weight_versions"] == [[0, "body"]]


def test_a_body_has_a_limit(live: LiveSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.features.weight_updates.sources.Sources.most_bytes", lambda self, config: 1000)
    assert ask(live.port, "POST", "/update_weights", bytes(1001), BYTES).status == 413


def test_pieces_are_files_and_not_too_many(live: LiveSystem, storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.features.weight_updates.engine.MOST_PIECES", 1)
    tensors = {NAME: load_file(storage / "weights" / "step-1" / "model.safetensors")[NAME]}
    (storage / "weights" / "piece.safetensors").write_bytes(save(tensors))
    assert said(live, "POST", "/start_weight_update")[0] == 200
    info = {**info_of(tensors), "path": "piece.safetensors"}
    assert said(live, "POST", "/update_weights", {"update_info": {**info, "names": ["other"]}})[0] == 400
    assert said(live, "POST", "/update_weights", {"update_info": {**info, "path": "step-1"}})[0] == 400
    assert said(live, "POST", "/update_weights", {"update_info": info})[0] == 200
    assert said(live, "POST", "/update_weights", {"update_info": info})[0] == 400
    assert said(live, "POST", "/finish_weight_update", {})[0] == 200
    assert choice(live)["weight_versions"] != []
