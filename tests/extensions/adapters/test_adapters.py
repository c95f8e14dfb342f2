"""Adapters over HTTP: asked for as models, loaded and unloaded while requests run, by operators alone."""

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import PreTrainedModel

from engine.config import Config, build_config
from engine.features.lora.files import NAME, Adapter, AdapterRules
from engine.features.lora.planner import LoraPlanner
from engine.settings.sections import ServerSection
from engine.types.errors import RequestError
from engine.types.notices import EngineReady
from engine.workers.messages import FrontendState, Handover
from server.extensions.adapters.adapters import MAX_NAMES, Adapters
from server.openai.translator import Translator
from server.variant import ServedVariant
from tests.extensions.adapters.cards import card_with
from tests.features.lora.made import greedy, make_adapter, merged
from tests.models.checkpoints import build, random_tokens, save
from tests.server.http_client import RawClient, Reply, ask, http_bytes
from tests.server.live_server import CARD, LiveServer
from tests.server.live_system import MODEL, LiveSystem
from tests.server.test_administration import bearer
from tests.server.test_frontend_process import on_stage

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = random_tokens(40, 5)


class Scene:
    """A server of a tiny model; ``good`` lies in its folder from the start, others are added below ``later``."""

    def __init__(self, root: Path) -> None:
        self.reference = build("qwen3-tied")
        self.folder = root / "adapters"
        self.good = make_adapter(self.folder / "good", self.reference, 1)
        make_adapter(self.folder / MODEL, self.reference, 7)
        shutil.copytree(self.good, self.folder / os.fsdecode(b"\xff"))  # no name that JSON could have
        (self.folder / "broken").mkdir()
        (self.folder / "broken" / "adapter_config.json").write_text("{}")
        tables = {
            "model": {"path": str(save(self.reference, root / "model")), "name": MODEL, "tokenizer": "none"},
            "device": {"threads": 1},
            "kv": {"num_pages": 64, "page_size": 4},
            "lora": {"folder": str(self.folder), "max_adapters": 2, "max_rank": 4},
        }
        self.live = LiveSystem(build_config(Config(), tables))

    @property
    def rules(self) -> AdapterRules:
        return msgspec.msgpack.decode(self.live.system.engine.facts[NAME], type=AdapterRules)

    def post(self, path: str, name: str, **fields: Any) -> Reply:
        return ask(self.live.port, "POST", path, {"lora_name": name, **fields})

    def says(self, model: str, **fields: Any) -> tuple[list[int], int]:
        """Tokens, and how many of the prompt were cached."""
        body = {"model": model, "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": 6, **fields}
        reply = ask(self.live.port, "POST", "/v1/completions", {**body, "return_token_ids": True})
        assert reply.status == 200, reply.body
        assert reply.json["model"] == model
        cached = reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
        return reply.json["choices"][0]["token_ids"], cached

    def expected(self, folder: Path | None = None) -> list[int]:
        model: PreTrainedModel = self.reference if folder is None else merged(self.reference, folder)
        return greedy(model, PROMPT, 6)

    def names(self) -> list[str]:
        return [one["id"] for one in ask(self.live.port, "GET", "/v1/models").json["data"]]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    one = Scene(tmp_path_factory.mktemp("scene"))
    with one.live:
        yield one


def test_an_adapter_is_a_model_with_a_parent(scene: Scene) -> None:
    assert scene.names() == [MODEL, "good"]  # what is broken, or has the model's name, was left out
    body = ask(scene.live.port, "GET", "/v1/models/good").json
    assert (body["id"], body["parent"], body["root"]) == ("good", MODEL, MODEL)
    assert ask(scene.live.port, "GET", f"/v1/models/{MODEL}").json["parent"] is None
    assert scene.says(MODEL)[0] == scene.expected()
    assert scene.says("good")[0] == scene.expected(scene.good)
    reply = ask(scene.live.port, "POST", "/v1/completions", {"model": "best", "prompt": PROMPT})
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


def test_the_metrics_name_the_adapters_of_what_runs(scene: Scene) -> None:
    body = {"model": "good", "prompt": PROMPT, "ignore_eos": True, "max_tokens": 200}
    with RawClient(scene.live.port) as client:
        client.send(http_bytes("POST", "/v1/completions", json.dumps(body).encode()))
        # The gauges have digests; which name is whose is the server's to know.
        assert scene.live.wait_until(lambda gauges: bool(gauges.running_adapters), 10)
    assert b'max_lora="2"' in ask(scene.live.port, "GET", "/metrics").body


def test_other_content_under_one_name_finds_no_page_of_the_first(scene: Scene) -> None:
    first = make_adapter(scene.folder / "later" / "first", scene.reference, 2)
    second = make_adapter(scene.folder / "later" / "second", scene.reference, 3)
    assert scene.post(LOAD, "mine", lora_path="later/first").json == {"lora_name": "mine", "success": True}
    assert scene.says("mine") == (scene.expected(first), 0)
    assert scene.says("mine")[1] >= 36
    taken = scene.post(LOAD, "mine", lora_path=str(second))
    assert (taken.status, taken.error["param"]) == (400, "lora_name")
    assert scene.post(LOAD, "mine", lora_path=str(second), load_inplace=True).status == 200
    assert scene.says("mine") == (scene.expected(second), 0)
    assert scene.post(LOAD, "mine", lora_path="later/first", load_inplace=True).status == 200
    tokens, cached = scene.says("mine")
    assert tokens == scene.expected(first)
    assert cached >= 36  # its pages are known by what is in the files
    assert scene.post(UNLOAD, "mine").status == 200
    assert "mine" not in scene.names()


def test_who_runs_with_an_adapter_goes_on_when_its_name_is_gone(scene: Scene) -> None:
    folder = make_adapter(scene.folder / "later" / "leaving", scene.reference, 4)
    expected = greedy(merged(scene.reference, folder), PROMPT, 60)
    assert scene.post(LOAD, "leaving", lora_path="later/leaving").status == 200
    asked = [{"prompt": PROMPT, "model": "leaving", "max_tokens": 60, "return_token_ids": True}] * 3
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(lambda fields: scene.live.complete(**fields), one) for one in asked]
        assert scene.live.wait_until(lambda gauges: gauges.num_open > 0, 5)
        assert scene.post(UNLOAD, "leaving").status == 200
        done = [one.result() for one in running]
    for reply in done:
        assert reply.status in (200, 404)
        if reply.status == 200:
            assert reply.json["choices"][0]["token_ids"] == expected
    assert any(reply.status == 200 for reply in done)
    assert scene.post(UNLOAD, "leaving").error["code"] == "adapter_not_found"


def test_files_that_are_gone_end_the_request_and_nothing_else(scene: Scene) -> None:
    folder = make_adapter(scene.folder / "later" / "gone", scene.reference, 5)
    assert scene.post(LOAD, "gone", lora_path="later/gone").status == 200
    kept = folder.rename(folder.with_name("kept"))
    for _ in range(2):
        reply = ask(scene.live.port, "POST", "/v1/completions", {"model": "gone", "prompt": PROMPT, "max_tokens": 3})
        assert (reply.status, reply.error["code"]) == (500, "adapter_lost")
    assert scene.says(MODEL)[0] == scene.expected()
    kept.rename(folder)
    assert scene.says("gone") == (scene.expected(folder), 0)
    assert scene.live.system.executors.num_restarts == 0
    scene.post(UNLOAD, "gone")


def test_numbers_that_are_not_finite_reach_no_step(scene: Scene) -> None:
    """Other rows of the step would get them too, times zero."""
    folder = shutil.copytree(scene.good, scene.folder / "later" / "infinite")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 1e308}))
    assert scene.post(LOAD, "infinite", lora_path="later/infinite").status == 200
    reply = ask(scene.live.port, "POST", "/v1/completions", {"model": "infinite", "prompt": PROMPT, "max_tokens": 3})
    assert (reply.status, reply.error["code"]) == (500, "adapter_lost")
    scene.post(UNLOAD, "infinite")


@pytest.mark.parametrize(
    ("name", "path", "param", "reason"),
    [
        ("x", "..", "lora_path", "not below lora.folder"),
        ("x", "/etc", "lora_path", "not below lora.folder"),
        ("x", "a\0b", "lora_path", "not below lora.folder"),
        ("x", "nowhere", "lora_path", "no such file"),
        ("x", "broken", "lora_path", "peft_type"),
        (MODEL, "good", "lora_name", "the model's own name"),
        ("", "good", "lora_name", "printable"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_name(scene: Scene, name: str, path: str, param: str, reason: str) -> None:
    reply = scene.post(LOAD, name, lora_path=path)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert reason in reply.error["message"]


def test_a_link_out_of_the_folder_is_no_way_out(scene: Scene, tmp_path: Path) -> None:
    shutil.copytree(scene.good, tmp_path / "outside")
    (scene.folder / "later").mkdir(exist_ok=True)
    (scene.folder / "later" / "link").symlink_to(tmp_path / "outside")
    assert "not below" in scene.post(LOAD, "x", lora_path="later/link").error["message"]


def test_an_adapter_that_is_unloaded_meanwhile_is_never_the_model() -> None:
    translator = Translator(CARD)
    translator.variants["a"] = ServedVariant(created=0, parts=Adapter("digest", "/path").parts)
    translator.check_model("a")
    del translator.variants["a"]  # as can be while a thread understands a long body
    with pytest.raises(RequestError, match="'a' does not exist"):
        translator.parts_of("a")


@pytest.mark.slow
async def test_a_thousand_loads_and_unloads_leave_nothing(scene: Scene) -> None:
    planner = scene.live.system.monitor._scheduler.planner
    assert planner is not None
    registry = Adapters(scene.rules, {}, MODEL)
    for number in range(1000):
        await registry.load(f"a{number}", "good", in_place=False)
        registry.unload(f"a{number}")
    assert not registry.served
    config = json.loads((scene.good / "adapter_config.json").read_text())
    for number in range(20):  # other content each time, through two slots
        (scene.good / "adapter_config.json").write_text(json.dumps({**config, "round": number}))
        assert scene.post(LOAD, f"a{number}", lora_path="good").status == 200
        assert scene.says(f"a{number}")[0] == scene.expected(scene.good)
        assert scene.post(UNLOAD, f"a{number}").status == 200
    assert set(scene.names()) == {MODEL, "good"}
    slots = next(one for one in planner.features.all if isinstance(one, LoraPlanner))
    assert not slots._slots._of_row
    assert not slots._to_place


def test_only_operators_load_and_only_where_there_is_a_folder(tmp_path: Path) -> None:
    bodies = {LOAD: {"lora_name": "a", "lora_path": "b"}, UNLOAD: {"lora_name": "a"}}
    with LiveServer() as live:
        assert ask(live.port, "POST", LOAD, bodies[LOAD]).error["code"] == "adapters_off"
    keys = tmp_path / "keys.toml"
    keys.write_text('[clients]\nteam = "theirs----------"\n[operators]\nme = "mine------------"\n')
    with LiveServer(server=ServerSection(key_file=str(keys))) as live:
        for path, body in bodies.items():
            assert ask(live.port, "POST", path, body).status == 401
            assert ask(live.port, "POST", path, body, bearer("theirs----------")).error["code"] == "operators_only"
            assert ask(live.port, "POST", path, body, bearer("mine------------")).error["code"] == "adapters_off"


def test_names_have_a_limit(scene: Scene) -> None:
    one = ServedVariant(created=0, parts=Adapter("digest", "/path").parts)
    full = Adapters(scene.rules, {str(number): one for number in range(MAX_NAMES)}, MODEL)
    with pytest.raises(RequestError, match="adapters are loaded already"):
        full._check_name("new", in_place=False)
    full._check_name("7", in_place=True)


async def test_the_next_frontend_knows_what_was_loaded_in_this_one(scene: Scene) -> None:
    card = card_with({}, scene.rules)
    about = msgspec.msgpack.encode(card)
    states: list[bytes] = []

    async with on_stage(Handover(first_id=9, replay=(EngineReady(),), about=about)) as stage:
        status, _ = await stage.ask("POST", LOAD, {"lora_name": "kept", "lora_path": "good"})
        assert status == 200
        states.append((await stage.said(FrontendState)).state)
    async with on_stage(Handover(first_id=9, replay=(EngineReady(),), about=about, state=states[0])) as stage:
        _, models = await stage.ask("GET", "/v1/models")
        assert [one["id"] for one in models["data"]] == [card.name, "kept"]
