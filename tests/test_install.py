"""What pyproject.toml offers to install, and the commands that messages and pages tell people to type."""

import ast
import re
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PYPROJECT["project"]["optional-dependencies"]
NEEDED: list[str] = PYPROJECT["project"]["dependencies"]
TOLD = [
    path
    for pattern in (
        "*.md",
        "Makefile",
        "docs/*.md",
        "deploy/**/*",
        "callboard/**/*.py",
        "engine/**/*.py",
        "server/**/*.py",
        "examples/**/*.md",
    )
    for path in ROOT.glob(pattern)
    if path.is_file()
]
COMMAND = re.compile(r"pip install (?P<options>(?:-[^\n;]*? )?)['\"]?(?:callboard|\.)\[(?P<extras>[^]]+)\]")
# Its build imports the torch that it is built against, which no environment of pip's own has.
BUILT_HERE = "flash-attn"


def commands() -> list[tuple[str, str, list[str]]]:
    """(file, options, extras) of every command that installs some of them."""
    return [
        (path.name, found["options"], found["extras"].split(","))
        for path in TOLD
        for found in COMMAND.finditer(path.read_text())
    ]


def name_of(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement)[0].replace("_", "-").lower()


def imported() -> set[str]:
    """Packages that the wheel's code imports, at the top of a file or in a function."""
    found: set[str] = set()
    for folder in ("callboard", "engine", "server"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found.update(alias.name.partition(".")[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom):
                    found.add((node.module or "").partition(".")[0])
    return found - sys.stdlib_module_names - {"callboard", "engine", "server"}


@pytest.mark.slow
def test_what_is_installed_to_serve_is_what_is_imported() -> None:
    distributions = packages_distributions()
    providers = {
        package: {name.replace("_", "-").lower() for name in distributions.get(package, [])}
        for package in imported() - {"multidict", "yarl"}  # aiohttp's, and parts of its interface
    }
    needed = {name_of(requirement) for requirement in NEEDED}
    through_msgspec = {"tomli-w"}  # whoever writes TOML with it; the next test would miss it
    assert needed - through_msgspec - set().union(*providers.values()) == set(), "nothing imports them"
    known = needed | {name_of(one) for extra, listed in EXTRAS.items() if extra != "dev" for one in listed}
    assert [package for package, names in providers.items() if names and not names & known] == []


WITHOUT_THE_REST = """
import sys
from importlib.machinery import PathFinder

class WithoutTheRest:
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {absent} else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutTheRest()
from server.cli import main
main(["config"])
main(["generate", "for line in", "--max-tokens", "2", "--set", "device.threads=1"])
"""


def closure() -> set[str]:
    """Distributions that come with what is needed to serve."""
    found, ahead = set[str](), [name_of(requirement) for requirement in NEEDED]
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            with suppress(PackageNotFoundError):
                ahead += [name_of(one) for one in requires(name) or [] if "extra ==" not in one]
    return found


@pytest.mark.slow
def test_nothing_else_is_needed_to_serve() -> None:
    installed = closure()
    absent = {
        package
        for package, names in packages_distributions().items()
        if not {name.replace("_", "-").lower() for name in names} & installed | {"callboard"} & set(names)
    }
    assert {"transformers", "pytest", "openai"} <= absent
    program = WITHOUT_THE_REST.format(absent=absent)
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "[kv]" in ran.stdout


def test_a_next_major_of_what_is_needed_to_serve_is_not_taken_untried() -> None:
    assert [one for one in NEEDED if not re.search(r",<\d", one)] == []


def test_the_wheel_has_the_demo_model_and_nothing_that_trains() -> None:
    shared = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-data"]
    model = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "examples" / "demo_model").iterdir() if path.is_file()
    }
    kept = {path for path in model if not path.endswith(".py")}
    assert set(shared) == kept | {"examples/demo.toml"}
    for source, target in shared.items():
        assert target == source.replace("examples", "share/callboard")


def test_the_description_on_a_package_index_has_no_link_that_leads_nowhere() -> None:
    hook = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    (fragment,) = hook["fragments"]
    text = (ROOT / fragment["path"]).read_text()
    links = re.compile(r"\]\((?!https?://|#)[^)]*\)")
    assert links.search(text), "there is something to take out"
    for change in hook["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    assert not links.search(text)


def test_serving_installs_no_tools_of_the_tests() -> None:
    makefile = (ROOT / "Makefile").read_text()
    serves, tests = (
        re.search(rf"^\$\({name}\):.*\n((?:\t.*\n)+)", makefile, re.MULTILINE) for name in ("SERVES", "STAMP")
    )
    assert serves is not None
    assert tests is not None
    assert "[dev]" not in serves[1]
    assert "--quiet" not in serves[1], "the longest wait of a newcomer shows its progress"
    assert "[dev]" in tests[1]


def test_every_command_names_extras_that_there_are() -> None:
    assert {extra for _, _, extras in commands() for extra in extras} >= {"cuda", "otel", "ray", BUILT_HERE}
    for name, _, extras in commands():
        assert set(extras) <= set(EXTRAS), name


def test_what_is_built_against_torch_is_asked_for_with_the_torch_that_is_there() -> None:
    for name, options, extras in commands():
        assert ("--no-build-isolation" in options) == (BUILT_HERE in extras), name


@pytest.mark.parametrize("extra", EXTRAS)
def test_no_other_extra_needs_a_build_against_torch(extra: str) -> None:
    names = {name_of(requirement) for requirement in EXTRAS[extra]}
    assert (BUILT_HERE in names) == (extra == BUILT_HERE)


def test_a_gpu_gets_the_kernels_that_have_wheels() -> None:
    names = {name_of(requirement) for requirement in EXTRAS["cuda"]}
    assert names == {"flashinfer-python", "triton"}
