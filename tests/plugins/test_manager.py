"""Loading plugins: only what was chosen, and every ambiguity is an error that names who is at fault."""

import subprocess
import sys

import pytest

from engine.config import Config, build_config
from engine.plugins.hookspecs import hookimpl
from engine.plugins.manager import Plugins, available_plugins
from engine.plugins.selection import check_named, expected_context
from engine.settings.attention_names import AttentionNames
from engine.types.errors import PluginError
from tests.plugins.conftest import Install

HOOKIMPL = 'from engine.plugins.hookspecs import hookimpl\n\nCALLBOARD_PLUGIN = {"api": 1}\n'
EVICTION = HOOKIMPL + "@hookimpl\ndef callboard_eviction_strategy(context): return 'a strategy'\n"


def test_a_store_is_chosen_by_name_only() -> None:
    with pytest.raises(PluginError, match="no kv_store plugin named 'auto'; available: files"):
        Plugins({"kv_store": "auto"})


def test_a_backend_that_says_nothing_of_layouts_is_refused_a_page_first_pool(install: Install) -> None:
    install("acme", {"attention.plain": "plain"}, {"plain.py": HOOKIMPL})
    context = expected_context(build_config(Config(), {"kv": {"layout": "page_first"}}), None, device="cuda")
    with pytest.raises(PluginError, match=r"KV layout page_first, it takes layer_first.*can run here:.*torch"):
        check_named(Plugins({"attention": "plain"}), context)


def test_only_what_was_chosen_is_imported(install: Install) -> None:
    sources = {"good.py": EVICTION, "bad.py": "raise RuntimeError('imported')\n"}
    install("acme", {"eviction.good": "good", "policy.bad": "bad"}, sources)
    plugins = Plugins({"eviction": "good"})
    assert plugins.hook.callboard_eviction_strategy(context=None) == "a strategy"
    assert plugins.names == {"eviction": "eviction.good"}
    assert {"eviction.good", "policy.bad"} <= {info.name for info in available_plugins()}


def test_two_distributions_that_claim_one_name_are_refused(install: Install) -> None:
    install("acme", {"eviction.good": "good"}, {"good.py": EVICTION})
    install("zenith", {"eviction.good": "good"}, {})
    with pytest.raises(PluginError, match=r"'eviction\.good' is claimed by (acme and zenith|zenith and acme)"):
        Plugins({})


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (HOOKIMPL + "@hookimpl\ndef callboard_evictoin_strategy(context): ...\n", "callboard_evictoin_strategy"),
        (HOOKIMPL + "@hookimpl\ndef callboard_eviction_strategy(contxt): ...\n", "contxt"),
        (HOOKIMPL + "@hookimpl\nasync def callboard_eviction_strategy(context): ...\n", "is async"),
        ("import nowhere_at_all\n", r"acme 1\.0.*cannot be imported.*nowhere_at_all"),
        ("import sys; sys.exit(9)\n", r"acme 1\.0.*cannot be imported: SystemExit\(9\)"),
    ],
)
def test_a_mistake_of_the_author_is_an_error_that_names_the_plugin(install: Install, source: str, said: str) -> None:
    install("acme", {"eviction.bad": "bad"}, {"bad.py": source})
    with pytest.raises(PluginError, match=said) as refused:
        Plugins({"eviction": "bad"})
    assert "eviction.bad" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_two_answers_to_one_question_are_refused(install: Install) -> None:
    install("acme", {"policy.greedy": "greedy"}, {"greedy.py": EVICTION})
    with pytest.raises(PluginError, match=r"eviction\.lru and policy\.greedy; choose one"):
        Plugins({"eviction": "lru", "policy": "greedy"})


def test_a_module_that_stands_for_two_kinds_is_refused(install: Install) -> None:
    install("acme", {"eviction.both": "both", "policy.both": "both"}, {"both.py": EVICTION})
    with pytest.raises(PluginError, match=r"eviction\.both and policy\.both are one and the same"):
        Plugins({"eviction": "both", "policy": "both"})


def test_any_number_of_plugins_may_observe() -> None:
    class Observer:
        @hookimpl
        def callboard_request_finished(self) -> None: ...

    plugins = Plugins({"observer": ["log"]})
    plugins.register(Observer(), "observer.a")
    plugins.register(Observer(), "observer.b")
    impls = plugins.implementations("callboard_request_finished")
    assert [impl.plugin_name for impl in impls] == ["observer.a", "observer.b"]


def test_observers_that_are_unknown_or_named_twice_are_refused() -> None:
    with pytest.raises(PluginError, match="no observer plugin named 'auto'; available: kv_events, log"):
        Plugins({"observer": ["auto"]})
    with pytest.raises(PluginError, match="'log' more than once"):
        Plugins({"observer": ["log", "log"]})


def test_a_plugin_that_raises_when_it_is_imported_is_named(install: Install) -> None:
    install("acme", {"eviction.bad": "bad"}, {"bad.py": EVICTION + "raise RuntimeError('planted')\n"})
    with pytest.raises(PluginError, match=r"eviction\.bad \(acme 1\.0\) cannot be imported: RuntimeError\('planted'\)"):
        Plugins({"eviction": "bad"})


def test_options_for_a_plugin_that_is_not_there_are_refused() -> None:
    with pytest.raises(PluginError, match=r"'policy\.lmp'.*policy\.lpm"):
        Plugins({}, options={"policy.lmp": {"max_overtaken": 3}})
    Plugins({}, options={"policy.lpm": {"max_overtaken": 3}})


def test_two_attention_backends_may_be_chosen_and_each_is_asked_alone(install: Install) -> None:
    sources = {
        f"{name}.py": HOOKIMPL + f"@hookimpl\ndef callboard_attention_backend(context): return '{name}'\n"
        for name in ("first", "second")
    }
    install("acme", {f"attention.{name.removesuffix('.py')}": name.removesuffix(".py") for name in sources}, sources)
    plugins = Plugins({"attention": AttentionNames(prefill="first", decode="second")})
    asked = {name: plugins.asking(f"attention.{name}")(context=None) for name in ("first", "second")}
    assert asked == {"first": "first", "second": "second"}


def test_the_manager_imports_no_plugin() -> None:
    named = "[name for name in sys.modules if 'plugins.policy.' in name and not name.endswith('.settings')]"
    code = f"import sys, engine.plugins.manager; sys.exit(len({named}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_error_lists_what_can_run_here_and_says_why_the_rest_cannot(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {
        "good.py": 'CALLBOARD_PLUGIN = {"api": 1}\n',
        "bare.py": 'CALLBOARD_PLUGIN = {"api": 1, "packages": ["nowhere"]}\n',
        "gpu.py": 'CALLBOARD_PLUGIN = {"api": 1, "devices": ["cuda"]}\n',
        "mute.py": "",
    }
    install("acme", {f"comm.{name}": name for name in ("good", "bare", "gpu", "mute")}, sources)
    monkeypatch.setattr("engine.plugins.manager.gpu_bytes", lambda: 0)
    absent = r"bare \(needs nowhere\), gpu \(needs a GPU\), mute \(broken: callboard plugins says how\)"
    with pytest.raises(PluginError, match=rf"no comm plugin named 'x'; available: good, .*; not here: {absent}"):
        Plugins({"comm": "x"})
    monkeypatch.setattr("engine.plugins.manager.gpu_bytes", lambda: 1 << 30)
    with pytest.raises(PluginError, match=r"needs nowhere.*; available: good, gpu, .*; not here: mute"):
        Plugins({"comm": "bare"})
