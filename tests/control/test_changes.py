"""What differs between two configurations, and that every setting says what it takes to change it."""

from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest

from engine.config import Config, ConfigSource, build_config
from engine.control.changes import changed, changes, is_place, refuse_fixed, refuse_more_requests, refuse_places
from engine.settings.section import Changed
from engine.types.errors import ConfigError

SECTIONS = {name: type(getattr(Config(), name)) for name in Config.__struct_fields__}
SETTINGS = [(name, key) for name, section in SECTIONS.items() for key in section.__struct_fields__]
Tables = dict[str, dict[str, Any]]


@pytest.mark.parametrize(("section", "key"), SETTINGS)
def test_every_setting_says_how_it_changes(section: str, key: str) -> None:
    assert changed(SECTIONS[section], key) in ("live", "executors", "fixed")


def test_all_settings_of_a_kind_are_these() -> None:
    live = {f"{name}.{key}" for name, key in SETTINGS if changed(SECTIONS[name], key) == "live"}
    scheduler = {"scheduler.prefill_chunk", "scheduler.itl_target_ms", "scheduler.overlap_depth"}
    scheduler |= {"scheduler.max_weight_versions"}
    limits = {f"limits.{key}" for key in SECTIONS["limits"].__struct_fields__}
    assert live == limits | scheduler | {"plugins.policy"}, "test_changeover.py shows of each that it takes effect"


@pytest.mark.parametrize(
    ("tables", "found"),
    [
        ({}, {}),
        ({"kv": {"num_pages": 5}}, {"kv.num_pages": "executors"}),
        ({"limits": {"max_requests": 5}}, {"limits.max_requests": "live"}),
        ({"server": {"port": 5}}, {"server.port": "fixed"}),
        ({"plugins": {"options": {"policy.lpm": {"a": 1}}}}, {"plugins.options.'policy.lpm'": "live"}),
        ({"plugins": {"options": {"linear.torch": {"a": 1}}}}, {"plugins.options.'linear.torch'": "executors"}),
        ({"plugins": {"options": {"observer.log": {"a": 1}}}}, {"plugins.options.'observer.log'": "fixed"}),
    ],
)
def test_what_differs_is_named(tables: Tables, found: dict[str, Changed]) -> None:
    assert {one.key: one.changed for one in changes(Config(), build_config(Config(), tables))} == found


def test_no_secret_is_told() -> None:
    told = changes(Config(), build_config(Config(), {"server": {"api_key": "sk-secret-and-long"}}))
    assert [(one.key, one.before, one.after) for one in told] == [("server.api_key", "***", "***")]
    assert b"sk-secret" not in msgspec.json.encode(told)


def test_all_that_is_fixed_is_refused_at_once() -> None:
    found = changes(Config(), build_config(Config(), {"server": {"port": 5}, "model": {"name": "x"}}))
    with pytest.raises(ConfigError, match=r'model\.name \("", not "x"\), server\.port \(8000, not 5\): cannot change'):
        refuse_fixed(found)


def test_a_setting_of_free_text_that_is_not_fixed_is_a_name_of_a_plugin_or_a_place() -> None:
    hints = {name: get_type_hints(section) for name, section in SECTIONS.items()}
    free = {f"{name}.{key}" for name, key in SETTINGS if hints[name][key] in (str, dict[str, dict[str, Any]])}
    named = {f"plugins.{kind}" for kind in SECTIONS["plugins"].__struct_fields__} | {"model.quantization"}
    places = {f"{name}.{key}" for name, key in SETTINGS if is_place(SECTIONS[name], key)}
    can_change = {f"{name}.{key}" for name, key in SETTINGS if changed(SECTIONS[name], key) != "fixed"}
    assert free & can_change <= named | places
    assert places & can_change == {"model.path", "model.revision", "plugins.options"}


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({"model": {"path": "/etc"}}, "model.path"),
        ({"model": {"revision": "main", "dtype": "float32"}}, "model.revision"),
        ({"storage": {"folder": "/etc"}, "server": {"key_file": "/etc/keys"}}, "server.key_file, storage.folder"),
        ({"plugins": {"options": {"kv_store.files": {"path": "/etc"}}}}, "plugins.options.'kv_store.files'"),
        ({"plugins": {"options": {"policy.lpm": {"a": 1}}}}, "plugins.options.'policy.lpm'"),
    ],
)
def test_a_request_changes_no_place_and_learns_of_none(tables: Tables, named: str) -> None:
    with pytest.raises(ConfigError, match="a request cannot change where the server reads and writes") as refused:
        refuse_places(Config(), build_config(Config(), tables))
    assert str(refused.value).startswith(f"{named}: ")
    assert "/etc" not in str(refused.value)
    refuse_places(Config(), build_config(Config(), {"kv": {"num_pages": 5}, "plugins": {"kv_store": "files"}}))


def test_requests_have_the_room_that_was_made_for_them() -> None:
    more = build_config(Config(), {"limits": {"max_requests": 600}})
    with pytest.raises(ConfigError, match=r"limits\.max_requests=600: the server was started with 512"):
        refuse_more_requests(512, more)
    refuse_more_requests(600, more)


def test_a_text_takes_the_place_of_the_file_below_the_overrides(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    source = ConfigSource(tmp_path / "callboard.toml", ("kv.page_size=64",))
    config = source.load('[model]\npath = "weights"\n[kv]\npage_size = 1\nnum_pages = 7\n')
    assert (config.model.path, config.kv.page_size, config.kv.num_pages) == (str(tmp_path / "weights"), 64, 7)
    with pytest.raises(ConfigError, match=r"configuration:2: kv: .*page_sise"):
        source.load("[kv]\npage_sise = 1\n")
