"""docs/plugins.md: its package works as printed, and no hook, field, key, built-in or option is missing."""

import dataclasses
import importlib
import inspect
import json
import re
import tomllib
from pathlib import Path

import msgspec
import pytest
import torch

from callboard import LLM, SamplingParams
from engine.config import Config, build_config
from engine.graphs.passes import PassManager, build_passes
from engine.kv.events import KVEvent
from engine.kv.node import SHARED
from engine.messages import Finish
from engine.plugins import hookspecs
from engine.plugins.declaration import Declaration
from engine.plugins.hookspecs import EvictionContext, PolicyContext
from engine.plugins.kinds import chosen_plugins
from engine.plugins.manager import BUILTIN, Plugins
from engine.plugins.observers import Observers
from engine.plugins.options import Options
from engine.types.errors import PluginError, RequestError
from engine.types.params import Grammar
from tests.plugins.conftest import Install
from tests.plugins.test_observers import finished
from tests.plugins.test_policy import Waits, order

TEXT = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.DOTALL)
FILES = {match[1]: body for _, body in BLOCKS if (match := re.match(r"# (\S+)\n", body))}
SETTINGS = [tomllib.loads(body)["plugins"] for kind, body in BLOCKS if kind == "toml" and "[plugins]" in body]
HOOKS = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("callboard_")}
CONTEXTS = [kind for name, kind in vars(hookspecs).items() if name.endswith("Context")]


@pytest.fixture
def acme(install: Install) -> Path:
    """The package of the page, installed."""
    project = tomllib.loads(FILES["pyproject.toml"])["project"]
    return install(project["name"], project["entry-points"]["callboard"], {**FILES, "callboard_acme/__init__.py": ""})


def test_the_page_shows_these_files() -> None:
    names = (
        "mru",
        "shortest",
        "count",
        "jsonl",
        "last",
        "plain",
        "gloo",
        "words",
        "casts",
        "memory",
        "inside",
        "period",
        "table",
        "colours",
        "arcee",
        "squared",
        "arrows",
        "plans",
        "quarters",
    )
    modules = {f"callboard_acme/{name}.py" for name in names}
    assert set(FILES) == {"pyproject.toml", "test_acme.py", *modules}


def test_every_hook_is_implemented_by_one_of_its_files() -> None:
    assert all(any(f"def {name}(" in body for body in FILES.values()) for name in HOOKS)


@pytest.mark.parametrize("table", SETTINGS)
def test_its_settings_are_settings(acme: Path, table: dict[str, object]) -> None:
    config = build_config(Config(), {"plugins": table})
    section = config.plugins
    plugins = Plugins(chosen_plugins(config), section.options)
    assert all(plugins.find(f"model.{name}") for name in section.models)
    assert set(section.options) <= {*plugins.names.values(), *plugins.several["observer"]}


@pytest.mark.slow
@pytest.mark.parametrize("test", re.findall(r"^def (test_\w+)", FILES["test_acme.py"], re.MULTILINE))
def test_its_tests_pass(acme: Path, test: str) -> None:
    getattr(importlib.import_module("test_acme"), test)()


def test_its_attention_serves_beside_ours(acme: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12)
    texts = []
    for attention in ("torch", {"prefill": "torch", "decode": "plain"}, "plain"):
        with LLM(progress=False, config={"plugins": {"attention": attention}, "kv": {"num_pages": 64}}) as llm:
            texts.append(llm.generate(["def add(a, b):\n"], greedy)[0].text)
    assert texts[0] == texts[1] == texts[2]


def test_its_linear_kernel_serves(acme: Path) -> None:
    config = {"plugins": {"linear": "table"}, "model": {"quantization": "table4"}, "kv": {"num_pages": 64}}
    with LLM(progress=False, config=config) as llm:
        assert llm.generate(["def add(a, b):\n"], SamplingParams(temperature=0, max_tokens=4))[0].token_ids


def test_its_grammar_engine_constrains(acme: Path) -> None:
    choice = SamplingParams(temperature=1, seed=2, max_tokens=12, grammar=Grammar("choice", '["one", "two"]'))
    with LLM(progress=False, config={"plugins": {"grammar": "words"}, "kv": {"num_pages": 64}}) as llm:
        outputs = llm.generate(["number = "] * 8, [choice.replace(seed=seed) for seed in range(8)])
        assert {(output.text, output.finish_reason) for output in outputs} == {("one", "stop"), ("two", "stop")}
        with pytest.raises(RequestError, match="no grammars but choices"):
            llm.generate(["x"], choice.replace(grammar=Grammar("regex", "a")))


def test_its_strategy_and_its_policy_do_what_it_says(acme: Path) -> None:
    plugins = Plugins({"eviction": "mru", "policy": "shortest"})
    strategy = plugins.hook.callboard_eviction_strategy(context=EvictionContext(page_size=1, num_pages=1))
    old, new = (type("Part", (), {"last_used": step}) for step in (1, 2))
    assert strategy.rank(new) < strategy.rank(old)
    policy = plugins.hook.callboard_scheduling_policy(context=PolicyContext(4, 1, {"group": 2}))
    assert order(policy, [Waits(0, num_tokens=9), Waits(1, num_tokens=5), Waits(2, num_tokens=1)]) == [1, 0, 2]
    with pytest.raises(PluginError, match=r"'policy\.shortest'.*`grop`"):
        plugins.hook.callboard_scheduling_policy(context=PolicyContext(4, 1, {"grop": 2}))


def test_its_graph_pass_drops_casts_that_change_nothing(acme: Path) -> None:
    plugins = Plugins({"graph_pass": ["casts"]})
    passes = build_passes(plugins, torch.device("cpu"), torch.float32)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.zeros(2)
    kept = graph.call_method("to", (graph.call_method("to", (x, torch.float32)), torch.float64))
    graph.output((kept,))
    piece = torch.fx.GraphModule(torch.nn.Module(), graph)
    PassManager(passes).run(piece)
    assert [node.args[1] for node in piece.graph.find_nodes(op="call_method", target="to")] == [torch.float64]
    with pytest.raises(PluginError, match="graph_passes names 'casts' more than once"):
        Plugins({"graph_pass": ["casts", "casts"]})


def test_its_observers_observe(acme: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "requests.jsonl"
    plugins = Plugins({"observer": ["count", "jsonl"]})
    observers = Observers(plugins, {"observer.jsonl": {"path": str(path)}}, page_size=16)
    observers.request_finished([finished(3), finished(4, Finish.ABORT)])
    observers.request_finished([finished(5)])
    observers.kv_event([KVEvent("removed", "device", SHARED, b"", (b"1", b"2"), b"")])
    observers.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["request_id"] for line in lines] == [3, 4, 5]
    assert {**lines[1], "ended_at_unix_s": 0.0} == msgspec.to_builtins(finished(4, Finish.ABORT))
    assert {"output tokens of aborted requests: 8", "cached pages that left the device: 2"} <= set(caplog.messages)
    with pytest.raises(PluginError, match=r"'observer\.jsonl'.*`path`"):
        Observers(Plugins({"observer": ["jsonl"]}), {}, page_size=16)


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_has_a_heading_with_its_signature(name: str) -> None:
    assert f"\n### `{name}({', '.join(inspect.signature(HOOKS[name]).parameters)})`\n" in TEXT
    assert inspect.getdoc(HOOKS[name])


@pytest.mark.parametrize("kind", [*CONTEXTS, KVEvent], ids=lambda kind: kind.__name__)
def test_every_field_of_a_context_and_an_event_is_named(kind: type) -> None:
    (section,) = [part for part in TEXT.split("\n### ") if f"`{kind.__name__}`" in part.partition("\n## ")[0]]
    assert all(f"`{field.name}`" in section for field in dataclasses.fields(kind))


def test_every_key_of_a_declaration_has_a_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", TEXT.split("## What a plugin declares")[1].partition("\n## ")[0], re.MULTILINE)
    assert rows == list(Declaration.__struct_fields__)


def test_every_built_in_and_every_option_has_its_place() -> None:
    assert all(f"`{name.partition('.')[2]}`" in TEXT.partition("\n## ")[0] for name in BUILTIN)
    options = {}
    for name, module in BUILTIN.items():
        for one in vars(importlib.import_module(module)).values():
            if (
                inspect.isclass(one)
                and issubclass(one, Options)
                and one.__name__.endswith("Options")
                and one is not Options
            ):
                options[name] = {
                    field.name: "required" if field.required else field.default for field in msgspec.structs.fields(one)
                }
    rows = re.findall(r"^\| `([a-z0-9_.]+)` \| `(\w+)` \| ([\w.]+) \|", TEXT, re.MULTILINE)
    assert {(name, option, str(default)) for name, table in options.items() for option, default in table.items()} == {
        *rows
    }
