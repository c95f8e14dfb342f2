"""A deferred module is imported by its first use, and not by what looks at all modules."""

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine.host.deferred_modules import DeferredModules

NAMES = ("large.effects", "large.tools")
SOURCES = {
    "large/__init__.py": "EFFECTS = []\nfrom large import effects, tools as tools\n",
    "large/effects.py": "from large import EFFECTS\nEFFECTS.append('there')\n",
    "large/tools/__init__.py": "import large.effects\nVALUE = 7\nfrom large.tools import early as early\n",
    "large/tools/early.py": "from large import EFFECTS\nEFFECTS.append('early')\nclass Tool: ...\n",
    "large/tools/inner.py": "from large.tools import VALUE\nTWICE = 2 * VALUE\n",
    "large/compiler.py": "from large import EFFECTS\nSEEN = list(EFFECTS)\n",
    "large_alike.py": "",
}


@pytest.fixture
def deferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeferredModules]:
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "large" / "tools").mkdir(exist_ok=True)
    monkeypatch.syspath_prepend(tmp_path)
    found = DeferredModules(NAMES, ("large.compiler",))
    found.install()
    yield found
    if found in sys.meta_path:
        sys.meta_path.remove(found)
    for name in [one for one in sys.modules if one.partition(".")[0] in ("large", "large_alike")]:
        del sys.modules[name]


@pytest.fixture
def large(deferred: DeferredModules) -> Any:
    module = import_module("large")
    assert module.EFFECTS == []
    return module


def test_a_look_at_a_name_imports_all(large: Any) -> None:
    assert large.tools.VALUE == 7
    assert large.EFFECTS == ["there", "early"]
    assert large.tools is sys.modules["large.tools"]
    assert not any(isinstance(one, DeferredModules) for one in sys.meta_path)


def test_a_name_that_is_not_there_is_an_error(large: Any) -> None:
    with pytest.raises(AttributeError, match=r"'large\.tools' has no attribute 'nonsense'"):
        _ = large.tools.nonsense


def test_a_placeholder_that_was_taken_before_finds_the_names(large: Any) -> None:
    placeholder = large.tools
    import_module("large.tools.inner")
    assert placeholder is not large.tools
    assert placeholder.VALUE == 7


def test_a_module_below_imports_all(large: Any) -> None:
    assert import_module("large.tools.inner").TWICE == 14
    assert large.EFFECTS == ["there", "early"]


def test_what_relies_on_effects_has_them(large: Any) -> None:
    assert import_module("large.compiler").SEEN == ["there", "early"]


def test_modules_of_other_packages_and_looks_at_all_modules_import_nothing(large: Any) -> None:
    import_module("large_alike")
    assert inspect.getmodule(inspect.currentframe()) is sys.modules[__name__]
    assert [one for one in sys.modules.values() if isinstance(one, ModuleType) and hasattr(one, "__file__")]
    assert large.EFFECTS == []


def test_a_module_that_its_package_imports_runs_once(large: Any) -> None:
    early = import_module("large.tools.early")
    assert large.EFFECTS.count("early") == 1
    assert early is large.tools.early is sys.modules["large.tools.early"]
    assert early.__spec__.origin == early.__file__


def test_it_completes_once(large: Any, deferred: DeferredModules) -> None:
    deferred.complete()
    deferred.complete()
    assert large.EFFECTS == ["there", "early"]
