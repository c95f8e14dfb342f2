"""Several models in one callboard.toml: what holds for each, and what is said of mistakes."""

from pathlib import Path

import pytest

from engine.config import json_schema, load_config
from engine.types.errors import ConfigError
from server.extensions.models.configuration import SeveralModels, read_several

FILE = """\
[kv]
num_pages = 64

[[models]]
name = "a"
load = "demand"
[models.kv]
page_size = 32

[[models]]
name = "b"
[models.model]
path = "beside"
[models.kv]
page_size = 4
"""


def write(folder: Path, text: str = FILE) -> Path:
    path = folder / "callboard.toml"
    path.write_text(text)
    return path


def read(path: Path, *overrides: str, **environment: str) -> SeveralModels:
    config = read_several(path, overrides, environment)
    assert config is not None
    return config


def test_own_sections_are_laid_over_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "beside").mkdir()
    config = read(write(tmp_path))
    a, b = config.models
    assert (config.kv.num_pages, config.kv.page_size) == (64, 16)
    assert (a.table.load, b.table.load) == ("demand", "start")
    assert [(one.config.kv.num_pages, one.config.kv.page_size) for one in config.models] == [(64, 32), (64, 4)]
    assert [(one.config.model.name, one.config.model.path) for one in config.models] == [
        ("a", "demo"),
        ("b", str(tmp_path / "beside")),
    ]


def test_what_is_laid_over_the_file_holds_for_every_model(tmp_path: Path) -> None:
    config = read(write(tmp_path), "kv.page_size=8", CALLBOARD_KV__NUM_PAGES="9")
    every = [config, *(one.config for one in config.models)]
    assert {(one.kv.page_size, one.kv.num_pages) for one in every} == {(8, 9)}


def test_a_model_keeps_the_name_that_requests_choose_it_by(tmp_path: Path) -> None:
    config = read(write(tmp_path), "model.name=c", CALLBOARD_MODEL__NAME="d")
    assert [one.config.model.name for one in config.models] == ["a", "b"]


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("page_size = 4", "page_sise = 4", r"15: models\.kv: .*`page_sise`; known keys: page_size"),
        ("page_size = 4", "page_size = 3", r"15: models\.kv\.page_size: .* 3; allowed: 1, 4"),
        ('load = "demand"', 'load = "never"', r"6: models\.load: .*'never'; allowed: demand, start"),
        ('load = "demand"', 'lode = "demand"', r"6: \[\[models\]\]: .*`lode`; known keys: name, load"),
        ('name = "b"\n', "", r"10: \[\[models\]\]: .* missing required field `name`"),
        ('name = "b"', 'name = "a"', r"two \[\[models\]\] are called 'a'"),
        ("[models.kv]\npage_size = 4", "[models.server]\nport = 1", r"14: \[\[models\]\]: .*`server`; known keys"),
    ],
)
def test_a_mistake_names_its_line_in_the_table_of_its_model(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"callboard\.toml:? ?{said}"):
        read(write(tmp_path, FILE.replace(old, new)))


def test_a_table_that_is_no_list_of_tables_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"models: expected \[\[models\]\], one table for each model"):
        read_several(write(tmp_path, "[models]\nname = 'a'\n"), [], {})


def test_only_a_server_takes_several(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`callboard serve` alone takes"):
        load_config(write(tmp_path), [], {})
    assert read_several(None, [], {}) is None
    assert read_several(write(tmp_path, "[kv]\n"), [], {}) is None


def test_the_schema_has_the_tables() -> None:
    assert "load" in json_schema()["$defs"]["ModelTable"]["properties"]
