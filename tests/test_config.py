"""The configuration: defaults, three layers of overrides, and an error that names file and key for every mistake."""

import ast
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import OLD_KEYS, Config, build_config, json_schema, load_config, render_toml
from engine.plugins.kinds import chosen_plugins
from engine.settings.attention_names import AttentionNames
from engine.types.errors import ConfigError

ROOT = Path(__file__).parents[1]
SECTIONS = Config.__struct_fields__


def num_keys(path: Path) -> int:
    """Return how many settings a file of the source defines."""
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    keys = [ast.unparse(node.annotation) for one in classes for node in one.body if isinstance(node, ast.AnnAssign)]
    return sum(annotation.startswith("Annotated") for annotation in keys)


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "callboard.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, ""), environment={}) == Config()


def test_environment_goes_over_the_file_and_set_over_both(tmp_path: Path) -> None:
    path = write(tmp_path, "[kv]\npage_size = 1\n[server]\nport = 1\n[scheduler]\nprefill_chunk = 1\n")
    environment = {"CALLBOARD_KV__PAGE_SIZE": "64", "CALLBOARD_SERVER__PORT": "2", "UNRELATED": "x"}
    config = load_config(
        path, ["server.port=3", "model.path=some/where", "server.api_key=1234x77777777777"], environment
    )
    assert (config.scheduler.prefill_chunk, config.kv.page_size, config.server.port) == (1, 64, 3)
    assert (config.model.path, config.server.api_key) == ("some/where", "1234x77777777777")


def test_a_model_beside_the_file_is_found_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    config = load_config(write(tmp_path, '[model]\npath = "weights"\n'), environment={})
    assert config.model.path == str(tmp_path / "weights")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[kv]\npage_sise = 16\n", ["kv", "page_sise", "known keys: page_size"]),
        ("[kw]\n", ["kw", "known keys: model, device"]),
        ("path = 'x'\n", ["unknown field `path`", "; it is model.path"]),
        ("[adapters]\n", ["unknown field `adapters`", "; [lora]: LoRA adapters for the model"]),
        ('[kv]\npage_size = "16"\n', ["kv.page_size", "str"]),
        ("[kv]\npage_size = 17\n", ["kv.page_size", "17", "allowed: 1, 4, 8, 16"]),
        ("[kv]\nmemory_fraction = 2.0\n", ["kv.memory_fraction", "0.98"]),
        ("[kv]\nmemory_fraction = nan\n", ["kv.memory_fraction"]),
        ("[server]\nport = 70000\n", ["server.port", "65535"]),
        ("[server]\nport = -1\n", ["server.port", "0"]),
        ("[model]\ndtype = 'int3'\n", ["model.dtype", "int3", "allowed: auto, bfloat16"]),
        ("[placement]\nlink = 'ipc'\n", ["placement.link: not of its form", "'tcp://HOST:PORT'"]),
        ("kv = 3\n", ["kv", "int"]),
        ("[kv\n", ["not valid TOML", "line 1"]),
        ("[kv]\npage_size = 1\npage_size = 2\n", ["not valid TOML"]),
        (b"\xff\xfe", ["not UTF-8 at byte 0"]),
        ("a" * (2 << 20), ["larger than"]),
        ("[scheduler]\nmax_running = 64\nmax_step_tokens = 32\n", ["max_step_tokens=32", "max_running=64"]),
        ('[server]\nhost = "0.0.0.0"\n', ["server.host=0.0.0.0", "server.api_key", "server.key_file"]),
        ("x = " + "[" * 100_000, ["not valid TOML"]),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str | bytes, said: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        load_config(path, environment={})
    message = str(refused.value)
    assert all(part in message for part in said), message
    assert "\n" not in message
    assert refused.value.exit_code == 2


def test_a_file_that_is_no_configuration_is_named_beside_what_could_be(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Once upon a time")
    with pytest.raises(ConfigError, match=r"text\.txt: not valid TOML: .*; a configuration is a \.toml file, a model"):
        load_config(tmp_path / "text.txt", environment={})


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("kv.page_size", "expected section.key=value"),
        ("page_size=16", "unknown section"),
        ("kw.page_size=16", "unknown section"),
        ("page_size=16", "; it is kv.page_size"),
        ("folder=x", "; it is storage.folder or lora.folder"),
        ("adapters.x=1", r"; \[lora]: LoRA adapters for the model"),
        ("kv.page_sise=16", "unknown field `page_sise`; known keys: page_size"),
        ("kv.page_size=x", "--set kv.page_size=x"),
        ("kv.page_size=", "--set kv.page_size="),
    ],
)
def test_a_mistake_in_an_override_is_named(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        load_config(None, [override], {})


def test_what_is_printed_has_no_secrets() -> None:
    config = load_config(None, ["server.api_key=sk-shown-to-nobody", f"placement.cluster_key={'x' * 40}"], {})
    printed = render_toml(config)
    assert "sk-shown" not in printed
    assert "x" * 40 not in printed
    assert printed.count("(set, not shown)") == 2


@pytest.mark.parametrize("key", OLD_KEYS)
def test_an_old_key_is_answered_with_the_new_one(tmp_path: Path, key: str) -> None:
    section, _, name = key.partition(".")
    with pytest.raises(ConfigError, match=OLD_KEYS[key] + " now" if OLD_KEYS[key] else "no setting any more"):
        load_config(write(tmp_path, f"[{section}]\n{name} = 1\n"), environment={})
    new_section, _, new_name = OLD_KEYS[key].partition(".")
    assert not new_name or new_name in getattr(Config(), new_section).__struct_fields__
    assert name not in getattr(Config(), section).__struct_fields__


def test_a_mistake_in_the_environment_names_the_variable() -> None:
    with pytest.raises(ConfigError, match="CALLBOARD_KV__PAGE_SIZE"):
        load_config(None, [], {"CALLBOARD_KV__PAGE_SIZE": "x"})


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_a_missing_file_or_a_directory_is_one_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="missing" if "missing" in name else "directory"):
        load_config(tmp_path / name, environment={})


def test_the_printed_configuration_reads_back_as_the_same() -> None:
    overrides = ["kv.page_size=64", 'model.name="a \\"quoted\\" name"', 'plugins.observers=["log", "x"]']
    config = load_config(None, overrides, {})
    assert config.plugins.observers == ["log", "x"]
    assert msgspec.convert(tomllib.loads(render_toml(config)), Config) == config


def test_attention_has_one_name_or_one_for_each_phase() -> None:
    config = load_config(None, ['plugins.attention={ decode = "a\\"b" }'], {})
    assert config.plugins.attention == AttentionNames(prefill="auto", decode='a"b')
    assert msgspec.convert(tomllib.loads(render_toml(config)), Config) == config
    assert chosen_plugins(config)["attention"] == config.plugins.attention
    assert build_config(config, {"plugins": {"attention": "torch"}}).plugins.attention == "torch"
    with pytest.raises(ConfigError, match=r"plugins\.attention.*`decod`; known keys: prefill, decode"):
        load_config(None, ['plugins.attention={ decod = "torch" }'], {})


def test_every_key_has_a_doc_and_there_are_not_too_many() -> None:
    definitions = json_schema()["$defs"]
    sections = [definitions[type(getattr(Config(), section)).__name__] for section in SECTIONS]
    fields = [field for section in sections for field in section["properties"].values()]
    assert all("description" in field for field in fields)
    folders = [*ROOT.glob("engine/*/*/settings.py"), *ROOT.glob("server/extensions/*/settings.py")]
    assert num_keys(ROOT / "engine/settings/sections.py") <= 60, "a setting needs a user; remove one before you add one"
    most = {ROOT / "server/extensions/models/settings.py": 5}  # one of them is of the server, the others are of a model
    assert [one for one in folders if num_keys(one) > most.get(one, 4)] == [], "an optional part has few settings"


def test_tables_laid_over_a_configuration_are_checked_too() -> None:
    config = build_config(Config(), {"kv": {"page_size": 1}})
    assert (config.kv.page_size, config.scheduler) == (1, Config().scheduler)
    with pytest.raises(ConfigError, match="page_sise"):
        build_config(Config(), {"kv": {"page_sise": 1}})
    with pytest.raises(ConfigError, match="kx"):
        build_config(Config(), {"kx": {}})


TOML_VALUES = st.recursive(
    st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5) | st.datetimes() | st.times(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = [f"{section}.{key}" for section in SECTIONS for key in getattr(Config(), section).__struct_fields__]


@pytest.mark.reliability("U5", "any TOML value, of any type, for any key")
@settings(max_examples=300)
@given(key=st.sampled_from(KEYS), value=TOML_VALUES)
def test_any_value_anywhere_is_taken_or_refused_by_name(key: str, value: object) -> None:
    section, name = key.split(".")
    try:
        build_config(Config(), {section: {name: value}})
    except ConfigError as error:
        refusal = str(error)
    else:
        return
    assert section in refusal


def test_clients_with_keys_share_the_engine_fairly_unless_a_policy_is_named() -> None:
    keyed = {"server": {"key_file": "keys.toml"}}
    assert chosen_plugins(Config())["policy"] == "auto"
    assert chosen_plugins(build_config(Config(), keyed))["policy"] == "fair"
    assert chosen_plugins(build_config(Config(), {**keyed, "plugins": {"policy": "priority"}}))["policy"] == "priority"
