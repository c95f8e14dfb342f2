"""Settings that folders bring: found by a search, part of their section, read beside the code that uses them."""

import inspect
from typing import Annotated, ClassVar

import pytest

from engine.config import Config, build_config
from engine.settings import sections
from engine.settings.additions import additions, extended, with_sections
from engine.settings.section import Addition, Section, key
from engine.types.errors import ConfigError

MOST_OF_THE_CORE = 60


def core_sections() -> list[type[Section]]:
    """The sections as they are in the core's file, without what folders add."""
    kinds = [kind for _, kind in inspect.getmembers(sections, inspect.isclass) if kind.__module__ == sections.__name__]
    return [
        base for kind in kinds if Section in kind.__mro__ for base in [kind.__mro__[kind.__mro__.index(Section) - 1]]
    ]


def test_the_core_has_few_settings() -> None:
    own = {(kind.__name__, name) for kind in core_sections() for name in kind.__struct_fields__}
    assert ("KVSection", "page_size") in own
    assert len(own) <= MOST_OF_THE_CORE
    brought = [(one.table, name) for one in additions() for name in one.__struct_fields__]
    whole = [
        (name, key) for name in Config.__struct_fields__ for key in type(getattr(Config(), name)).__struct_fields__
    ]
    assert len(own) + len(brought) == len(whole)
    assert set(brought) <= set(whole)


def test_an_addition_is_read_from_the_section_that_it_is_in() -> None:
    for one in additions():
        assert one.of(Config()) == one()
    (store,) = (one for one in additions() if "store_timeout_s" in one.__struct_fields__)
    assert store.of(build_config(Config(), {"kv": {"store_timeout_s": 2.0}})) == store(store_timeout_s=2.0)


def test_values_are_checked_where_they_are_brought() -> None:
    with pytest.raises(ConfigError, match="traces need storage"):
        build_config(Config(), {"storage": {"trace_mb": 1}})
    with pytest.raises(ConfigError, match="at least 32"):
        build_config(Config(), {"placement": {"cluster_key": "short"}})
    with pytest.raises(ConfigError, match=r"known keys: page_size,.*num_host_pages"):
        build_config(Config(), {"kv": {"num_hosts": 1}})


def test_no_two_folders_bring_one_setting() -> None:
    class Twice(Section, frozen=True):
        page_size: Annotated[int, key("Tokens")] = 1
        num_host_pages: Annotated[int, key("Pages")] = 1

    with pytest.raises(TypeError, match="Twice: two folders bring num_host_pages"):
        extended("kv")(Twice)


def test_a_folder_may_bring_a_section() -> None:
    class Whole(Section, frozen=True):
        kv: Section = Section()
        model: Section = Section()

    tables = {one.table for one in additions()}
    assert {*with_sections(Whole).__struct_fields__} == tables | {"kv", "model"}
    assert {one.table for one in additions()} >= {"lora"}


def test_a_part_names_the_section_that_it_is_in() -> None:
    for one in additions():
        assert isinstance(one.table, str)
        assert issubclass(one, Addition)
        assert one.__doc__
        assert f"[{one.table}]" in one.__doc__
        assert inspect.get_annotations(one)["table"] == ClassVar[str]
