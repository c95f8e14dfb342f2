"""Forty files that are no configuration: code 2 and one line with file, line and key, before anything is loaded."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.figures import Figure
from tests.workers.forge import Forge

# What the file holds, and what is said of it after its name.
BROKEN: list[tuple[str | bytes, str]] = [
    # keys that do not exist
    ("[kv]\npage_sise = 16\n", "2: kv: Object contains unknown field `page_sise`; known keys: page_size"),
    ("\n\n[kw]\n", "3: Object contains unknown field `kw`; known keys: model, device"),
    ("include = 'callboard.toml'\n", "1: Object contains unknown field `include`"),
    ("[server]\nport = 1\n[server.tls]\ncert = 'x'\n", "3: server: Object contains unknown field `tls`"),
    ("[plugins.attention]\nprefil = 'torch'\n", "2: plugins.attention: Object contains unknown field `prefil`"),
    ("kv.page_sise = 16\n", "1: kv: Object contains unknown field `page_sise`"),
    ("kv = { page_sise = 16 }\n", "1: kv: Object contains unknown field `page_sise`"),
    ("[limits]\nmax_requests = 4\nmax_reqests = 4\n", "3: limits: Object contains unknown field `max_reqests`"),
    # types
    ('[kv]\n# pages\npage_size = "16"\n', "3: kv.page_size: Expected `int`, got `str`"),
    ("[kv]\npage_size = true\n", "2: kv.page_size: "),
    ("[kv]\npage_size = 16.0\n", "2: kv.page_size: "),
    ("kv = 3\n", "1: kv: Expected `object`, got `int`"),
    ("kv = []\n", "1: kv: Expected `object`, got `array`"),
    ("[[kv]]\npage_size = 1\n", "1: kv: Expected `object`, got `array`"),
    ("[model]\npath = 3\n", "2: model.path: Expected `str`, got `int`"),
    ("[model]\npath = 2024-01-01\n", "2: model.path: "),
    ("[server]\nport = '8000'\n", "2: server.port: Expected `int`, got `str`"),
    ("[server]\ncors_origins = 'https://a'\n", "2: server.cors_origins: Expected `array`, got `str`"),
    ("[server]\ncors_origins = ['https://a', 3]\n", "2: server.cors_origins[1]: Expected `str`, got `int`"),
    ("[server]\nshared_cache = 'yes'\n", "2: server.shared_cache: Expected `bool`, got `str`"),
    ("[plugins.options]\n'attention.torch' = 3\n", "plugins.options[...]: Expected `object`, got `int`"),
    # ranges
    ("[kv]\npage_size = 17\n", "2: kv.page_size: Invalid enum value 17"),
    ("[kv]\nmemory_fraction = 2.0\n", "2: kv.memory_fraction: Expected `float` <= 0.98"),
    ("[kv]\nmemory_fraction = nan\n", "2: kv.memory_fraction: "),
    ("[kv]\nmemory_fraction = -0.1\n", "2: kv.memory_fraction: "),
    ("[kv]\nnum_pages = -1\n", "2: kv.num_pages: Expected `int` >= 0"),
    ("[server]\nport = 70000\n", "2: server.port: Expected `int` <= 65535"),
    ("[server]\nclient_timeout_s = 0\n", "2: server.client_timeout_s: "),
    ("[server]\nclient_timeout_s = inf\n", "server.client_timeout_s=inf: expected a finite number"),
    ("[limits]\nmax_requests = 0\n", "2: limits.max_requests: Expected `int` >= 1"),
    ("[limits]\nmax_requests = 99999999999999999999\n", "2: limits.max_requests: "),
    ("[model]\ndtype = 'int3'\n", "2: model.dtype: Invalid enum value 'int3'"),
    ("[placement]\nlink = 'http://x'\n", "2: placement.link: "),
    # contradictions
    ("[scheduler]\nmax_running = 64\nmax_step_tokens = 32\n", "scheduler.max_step_tokens=32: smaller than"),
    ('[server]\nhost = "0.0.0.0"\n', "server.host=0.0.0.0: listening beyond loopback needs server.api_key"),
    # what is no TOML
    ("[kv\n", "not valid TOML: "),
    ("[kv]\npage_size = 1\npage_size = 2\n", "not valid TOML: "),
    ("[kv]\n[kv]\n", "not valid TOML: "),
    ("x = " + "[" * 100_000, "not valid TOML: "),
    (b"[kv]\npage_size = 16 # \xff\xfe\n", "not UTF-8 at byte 22"),
    (b"\xff\xfe[\x00k\x00v\x00]\x00", "not UTF-8 at byte 0"),
    (b"\x00" * 100, "not valid TOML: "),
    ("# " + "a" * (10 << 20), "larger than 1048576 bytes"),
]


@pytest.fixture(scope="module")
def forge() -> Iterator[Forge]:
    with Forge() as forge:
        forge.run("config")
        yield forge


@pytest.mark.reliability("P10", "files that are no configuration: keys, types, ranges, 10 MB, not UTF-8, not TOML")
def test_each_is_one_line_that_names_file_line_and_key(forge: Forge, tmp_path: Path, figure: Figure) -> None:
    path = tmp_path / "callboard.toml"
    slowest_s = 0.0
    for content, said in BROKEN:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        ended = forge.run("serve", str(path))
        assert ended.code == 2, (content[:100], ended.stderr)
        numbered = said[0].isdigit()
        expected = f"callboard: {path}:{said}" if numbered else said
        assert expected in ended.stderr, (content[:100], ended.stderr)
        assert f"{path}" in ended.stderr or "=" in said.partition(": ")[0]  # the latter may come from anywhere
        assert ended.stderr.count("\n") == 1
        slowest_s = max(slowest_s, ended.took_s)
    figure("files refused with code 2 and one line", len(BROKEN), at_least=40)
    figure("slowest", slowest_s, "s", at_most=1, patience=10)


@pytest.mark.reliability("P10", "a directory, a link in a circle, no file at all")
@pytest.mark.parametrize("how", ["directory", "circle", "missing"])
def test_what_is_no_file_is_one_line_too(forge: Forge, tmp_path: Path, how: str) -> None:
    path = tmp_path / "callboard.toml"
    match how:
        case "directory":
            path.mkdir()
        case "circle":
            path.symlink_to(path)
    ended = forge.run("serve", str(path))
    assert (ended.code, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert ended.stderr.startswith(f"callboard: {path}: ")
