"""The table of kinds agrees with the hooks, the settings, the folders of built-in plugins and the public page."""

import inspect
from pathlib import Path

import pytest

import callboard.plugins
from engine.config import Config, build_config
from engine.plugins import hookspecs, linears, selection
from engine.plugins.declaration import CONSTANT
from engine.plugins.kinds import KINDS, Kind, chosen_plugins
from engine.plugins.manager import BUILTIN
from engine.settings.sections import PluginsSection
from engine.types.errors import ConfigError

NO_KINDS = {"options", "race_s"}  # the settings of [plugins] that name no plugin


def test_every_hook_with_a_context_is_a_kinds_and_every_setting_that_names_plugins() -> None:
    hooks = {
        name
        for name, hook in vars(hookspecs).items()
        if name.startswith("callboard_") and "context" in inspect.signature(hook).parameters
    }
    assert {kind.hook for kind in KINDS.values()} == hooks
    assert {kind.setting for kind in KINDS.values()} == {*PluginsSection.__struct_fields__} - NO_KINDS


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_a_kind(kind: Kind) -> None:
    context = inspect.signature(getattr(hookspecs, kind.hook)).parameters["context"].annotation
    assert context.__name__ in callboard.plugins.__all__
    assert isinstance(getattr(PluginsSection(), kind.setting), list) == kind.several
    assert not kind.default or (kind.default in kind.built_in and kind.because)
    folder = Path(hookspecs.__file__).parent / kind.name
    found = {path for path in folder.glob("**/*.py") if f"{CONSTANT} =" in path.read_text()}
    assert {*kind.built_in} == {path.relative_to(folder).parts[0].removesuffix(".py") for path in found}


def test_preferred_plugins_come_with_callboard() -> None:
    assert {f"attention.{name}" for names in selection.PREFERRED.values() for name in names} <= {*BUILTIN}
    assert {f"linear.{name}" for name in (*linears.PREFERRED, *linears.INVARIANT)} <= {*BUILTIN}


def test_what_a_configuration_chooses_has_no_kind_that_it_does_without() -> None:
    several = {kind.name for kind in KINDS.values() if kind.several and not kind.by_model}
    one = {"attention", "linear", "eviction", "policy", "comm", "grammar", "snapshots"}
    assert {*chosen_plugins(Config())} == one | several
    named = build_config(Config(), {"plugins": {"kv_store": "files", "proposer": "ngram"}})
    assert {*chosen_plugins(named)} == one | several | {"kv_store", "proposer"}


@pytest.mark.parametrize("kind", ["comm", "eviction", "grammar", "policy", "snapshots"])
def test_what_every_engine_needs_cannot_be_none(kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"plugins\.{kind}='none': an engine needs one; expected 'auto', "):
        chosen_plugins(build_config(Config(), {"plugins": {kind: "none"}}))
