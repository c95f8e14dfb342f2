"""``callboard plugins``: everything that is installed, what it needs and why it cannot run, without importing it."""

import subprocess
import sys

import pytest

from engine.config import Config, build_config
from engine.plugins.hookspecs import AttentionContext
from engine.plugins.listing import Listed, list_plugins
from engine.plugins.manager import BUILTIN
from server.cli import main
from tests.plugins.conftest import Install

CPU = AttentionContext("cpu", "float32", page_size=16, num_heads=8, num_kv_heads=2, head_size=64)
BROKEN = "raise RuntimeError('ran')\n"


def rows(config: Config | None = None) -> dict[str, Listed]:
    return {row.info.name: row for row in list_plugins(config or Config(), CPU)}


@pytest.fixture
def acme(install: Install) -> None:
    """Plugins that would raise if anything imported them."""
    declared = '{"api": 1, "packages": ["nowhere"], "devices": ["cuda"], "page_sizes": [64], "phases": ["decode"]}'
    install(
        "acme",
        {"attention.fast": "acme_parts.fast", "policy.old": "acme_parts.old", "router.new": "acme_parts.new"},
        {
            "acme_parts/__init__.py": BROKEN,
            "acme_parts/fast.py": f"CALLBOARD_PLUGIN = {declared}\n" + BROKEN,
            "acme_parts/old.py": BROKEN,
            "acme_parts/new.py": BROKEN,
        },
    )


def test_needs_and_hindrances_of_what_could_not_be_imported(acme: None) -> None:
    listed = rows()
    assert listed["attention.fast"].needs == "nowhere; cuda; page 64; decode only"
    assert listed["attention.fast"].hindrances == (
        "package nowhere is not installed",
        "device cpu, it takes cuda",
        "page size 16, it takes 64",
    )
    assert "does not say which plugin API" in listed["policy.old"].hindrances[0]
    assert listed["router.new"].hindrances == ("this callboard has no plugins of kind 'router'",)
    assert not any(listed[name].hindrances for name in ("attention.torch", "eviction.lru", "observer.log"))
    assert "acme_parts" not in sys.modules


def test_the_chosen_are_marked() -> None:
    def chosen(tensor_parallel: int = 1, **plugins: object) -> dict[str, str]:
        config = build_config(Config(), {"plugins": plugins, "device": {"tensor_parallel": tensor_parallel}})
        return {name: row.chosen for name, row in rows(config).items() if row.chosen}

    names = ("attention.torch", "comm.local", "eviction.lru", "grammar.llguidance", "policy.priority", "snapshots.ends")
    linears = ("linear.fbgemm_fp16", "linear.onednn", "linear.panels", "linear.torch")
    usual = dict.fromkeys(names, "yes") | dict.fromkeys(linears, "if fastest")
    assert chosen() == usual
    kernel = dict.fromkeys(linears, "") | {"linear.torch": "yes"}
    assert chosen(linear="torch") == {name: mark for name, mark in (usual | kernel).items() if mark}
    assert chosen(tensor_parallel=2).keys() ^ usual.keys() == {"comm.local", "comm.torch"}
    assert chosen(policy="lpm", observers=["log"]) == {
        **{name: mark for name, mark in usual.items() if name != "policy.priority"},
        "policy.lpm": "yes",
        "observer.log": "yes",
    }
    assert chosen(attention={"decode": "torch"}) == usual
    assert chosen(attention={"prefill": "torch", "decode": "nonsense"}) == {**usual, "attention.torch": "prefill"}


def test_the_parsers_that_the_chat_template_means_are_marked() -> None:
    def chosen(template: str | None, **plugins: object) -> set[str]:
        config = build_config(Config(), {"plugins": plugins})
        listed = list_plugins(config, CPU, template)
        return {row.info.name for row in listed if row.chosen and row.info.kind.endswith("_parser")}

    assert chosen(None) == set()
    assert chosen("") == {"tool_parser.hermes"}
    assert chosen("[TOOL_CALLS] <think>") == {"tool_parser.mistral", "reasoning_parser.think"}
    assert chosen("<think>", reasoning_parser="none", tool_parser="glm4") == {"tool_parser.glm4"}
    assert chosen(None, reasoning_parser="granite") == {"reasoning_parser.granite"}


def test_the_command_prints_them_all(
    acme: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")  # no name is cut, whatever the width
    main(["plugins", "--set", "device.kind=cpu", "--set", "kv.page_size=64"])
    out = capsys.readouterr().out
    lines = {name: line for line in out.splitlines() for name in [*BUILTIN, "attention.fast"] if f" {name} " in line}
    assert set(lines) == {*BUILTIN, "attention.fast"}
    assert "acme 1.0" in lines["attention.fast"]
    assert "cannot run here: package nowhere is not installed; device cpu, it takes cuda" in lines["attention.fast"]
    assert lines["attention.torch"].startswith("* ")
    assert lines["tool_parser.hermes"].startswith("* "), "by the demo model's chat template"
    assert "here: cpu, float32, pages of 64, heads of 64" in out


def test_a_model_that_would_have_to_be_downloaded_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plugins", "--set", "model.path=nobody/nothing", "--set", "device.kind=cpu"])
    assert "a model that is not on this machine" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_listing_imports_no_backend() -> None:
    code = (
        "import sys; from server.cli import main; main(['plugins', '--set', 'device.kind=cpu']); "
        "loaded = {name for name in sys.modules if name.startswith('engine.plugins.attention.')}; "
        "sys.exit(len(loaded - {'engine.plugins.attention.settings'}))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
