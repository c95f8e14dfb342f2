"""README, docs/ and the other pages: links and anchors resolve, the site's list of pages is whole, examples are right.

`make snippets` runs the commands and programs of README and the quick start; here they are only read.
"""

import argparse
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml

from engine.config import Config, build_config, load_config
from server.cli import main
from server.commands.configuration import read_source
from tests.snippets import PAGES, Block, Runner, read_blocks

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
EVERY = [*sorted(ROOT.glob("*.md")), *DOCS, ROOT / "examples" / "plugin_template" / "README.md"]
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
MARKS = re.compile(r"[^\w\- ]")


def prose(path: Path) -> str:
    return FENCE.sub("", path.read_text())


def anchors(path: Path) -> set[str]:
    """What headings are called in links, on GitHub and by MkDocs alike."""
    return {MARKS.sub("", heading.lower()).strip().replace(" ", "-") for heading in HEADING.findall(prose(path))}


def links() -> Iterator[tuple[Path, str]]:
    for path in EVERY:
        for target in LINK.findall(re.sub(r"`[^`\n]*`", "", prose(path))):
            if not target.startswith(("http://", "https://")):
                yield path, target


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(path: Path) -> None:
    broken: list[str] = []
    for page, target in links():
        if page != path:
            continue
        file, _, anchor = target.partition("#")
        goal = (page.parent / file).resolve() if file else page
        if not goal.exists() or (anchor and goal.suffix == ".md" and anchor not in anchors(goal)):
            broken.append(target)
    assert broken == []


def test_the_site_has_every_page_once() -> None:
    def listed(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict):
            for value in entry.values():
                yield from listed(value)
        elif isinstance(entry, list):
            for one in entry:
                yield from listed(one)

    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    pages = list(listed(site["nav"]))
    assert sorted(pages) == [path.name for path in DOCS]
    for hook in site["hooks"]:
        assert (ROOT / hook).exists()


def test_every_page_is_reached_from_the_readme() -> None:
    """By links in the text: whoever reads the repository has no list of pages beside it."""
    reached, ahead = set[Path](), [ROOT / "README.md"]
    leads = [(page, (page.parent / target.partition("#")[0]).resolve()) for page, target in links()]
    while ahead:
        page = ahead.pop()
        reached.add(page)
        ahead += [goal for start, goal in leads if start == page and goal in EVERY and goal not in reached]
    assert [path.name for path in DOCS if path not in reached and path.name != "index.md"] == []


USED_BY_OPERATORS = [ROOT / "docs" / f"{name}.md" for name in ("tuning", "troubleshooting", "faq")]


@pytest.mark.parametrize("path", USED_BY_OPERATORS, ids=lambda path: path.stem)
def test_every_setting_that_is_advised_is_one(path: Path) -> None:
    sections = msgspec.to_builtins(Config())
    named = re.findall(r"`([a-z]+)\.(\w+)(?: = [^`]*)?`", path.read_text())
    settings = [(section, key) for section, key in named if section in sections]
    assert settings
    assert [f"{section}.{key}" for section, key in settings if key not in sections[section]] == []


def test_every_code_and_metric_that_is_explained_is_one() -> None:
    source = "".join(path.read_text() for tree in ("engine", "server") for path in (ROOT / tree).rglob("*.py"))
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    codes = {
        code for row in re.findall(r"^\| \d{3}, (.*?) \|", page, re.MULTILINE) for code in re.findall(r"`(\w+)`", row)
    }
    assert len(codes) > 5
    assert [code for code in codes if f'"{code}"' not in source] == []
    metrics = re.findall(r"^\| (`\w+`.*?) \|", (ROOT / "docs" / "tuning.md").read_text(), re.MULTILINE)
    names = {name for row in metrics for name in re.findall(r"`(\w+)`", row)}
    assert len(names) > 5
    assert [name for name in names if f'"{name}"' not in source] == []


def every_block() -> list[Block]:
    return [block for page in PAGES for block in read_blocks(page)]


def test_what_is_not_run_says_why() -> None:
    assert [block for block in every_block() if block.language in ("console", "python") and block.skipped == ""] == []
    reasons = {block.skipped for block in every_block() if block.skipped}
    assert 0 < len(reasons) < 10


def test_every_program_can_be_compiled_and_says_what_it_prints() -> None:
    programs = [block for block in every_block() if block.language == "python"]
    assert len(programs) >= 3
    for block in programs:
        compile(block.text, f"{block.page}:{block.line}", "exec")
        assert block.skipped or block.output, f"{block.page}:{block.line}: followed by a block of text"


def test_every_command_of_ours_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it needs a GPU, a hub or a daemon: its options exist, and so do its file and settings."""

    def check_instead(parsed: argparse.Namespace) -> None:
        source = read_source(parsed)
        known = None if source.path is None or str(source.path) == "my.toml" else ROOT / source.path
        load_config(known, source.overrides, {"CALLBOARD_SERVER__API_KEY": "k" * 16})
        raise SystemExit(0)

    monkeypatch.setattr("server.commands.configuration.read_configuration", check_instead)
    monkeypatch.setattr("engine.host.logs.LogSettings.apply", lambda _: None)
    commands = [command for block in every_block() for command, _ in block.commands()]
    ours = [
        words[1:]
        for words in (shlex.split(one.partition(">")[0], comments=True) for one in commands)
        if words[:1] == ["callboard"]
    ]
    assert len(ours) > 10
    for words in ours:
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0, words


def test_what_prints_something_else_than_its_page_shows_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "1. In a list:\n\n"
        "    ```console\n    $ echo one two\n    one ...\n    $ echo two\n    one\n    $ false\n    ```\n\n"
        "```python\nprint(1)\n```\n\n```text\n2\n```\n\n<!-- not run: no GPU -->\n```console\n$ nvidia-smi\n```\n"
    )
    console, program, skipped = read_blocks(page)
    runner = Runner(tmp_path, {"PATH": "/usr/bin:/bin"}, port=1)
    assert [complaint.splitlines()[0] for complaint in runner.run(console)] == [
        "page.md:3: echo two",
        "page.md:3: false",
    ]
    assert [complaint.splitlines()[0] for complaint in runner.run(program)] == ["page.md:11: print(1)"]
    assert skipped.skipped == "no GPU"


def test_every_configuration_is_one() -> None:
    tables = [block for block in every_block() if block.language == "toml"]
    assert tables
    for block in tables:
        build_config(Config(), tomllib.loads(block.text))
