"""callboard.plugins is the one page a plugin imports from: whatever a hook or a protocol names is on it."""

import ast
import dataclasses
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import callboard.plugins
import callboard.plugins.testing
from engine import plugins as ours
from engine.plugins import hookspecs

ROOT = Path(__file__).parents[2]
PAGE = callboard.plugins
TEMPLATE = sorted(path for name in ("plugin", "model") for path in (ROOT / "examples").glob(f"{name}_template/**/*.py"))
KIT = sorted(Path(ours.__file__).parent.glob("testing/*.py"))
HOOKS = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("callboard_")}
WORD = re.compile(r"\b[A-Z]\w+\b")
# What is Python's, numpy's or torch's, or a value that the engine hands to nobody but itself.
ELSEWHERE = {
    "Struct",
    "Any",
    "Literal",
    "None",
    "Protocol",
    "Sequence",
    "Tensor",
    "Callable",
    "Iterator",
    "NDArray",
    "Path",
    "Recurrences",
}

# Parameters of version 1, which stay as long as it does; further ones go to their ends.
PARAMETERS = {
    "alike": "fields sizes layer",
    "attention_factory": "name context",
    "decode_options": "plugin table kind",
    "decoder": "fields sizes layers tied norm offset unread names",
    "marked_calls": "calls opening answer many forced separator called",
    "namespace_seed": "namespace",
    "pre_norm": "fields attention mlp recurrent",
    "read_activation": "fields name default",
    "read_gated": "fields sizes bias merged name",
    "read_layer_types": "fields sizes default",
    "read_norm": "fields name offset default_eps",
    "read_picture": "data",
    "read_rotary": "fields sizes theta partial",
    "read_sizes": "fields head_size num_kv_heads",
    "windowed_layers": "fields sizes attention window windowed",
    "written_values": "tool begin then end",
    "attend": "q_nNH keys_LGH values_LGH scale window soft_cap sinks_N chunked",
    "attention_cases": "declares",
    "check_attention_backend": "factory declares device invariant",
    "check_case": "case factory device",
    "check_comm": "make_group sizes device",
    "check_encoder": "make dtype",
    "check_eviction_strategy": "make",
    "check_grammar_engine": "make examples",
    "check_kv_store": "make",
    "check_linear": "hook declares device options",
    "check_logits_processor": "make tables device",
    "check_model": "hook reference directory ranks captured options",
    "check_observer": "make",
    "check_proposer": "make vocab_size",
    "check_rank": "comm device",
    "check_reasoning_parser": "make write num_outputs seed",
    "check_scheduling_policy": "make",
    "check_snapshot_policy": "make",
    "check_tool_parser": "make write alone escapes num_outputs seed",
    "check_transfer": "make names",
    "read_declaration": "module",
    "through_hook": "hook options invariant",
}


def named_by(thing: Any) -> set[str]:
    """The names of types in the annotations of a function, or of a class's fields, properties and methods."""
    if inspect.isfunction(thing):
        return set(WORD.findall(" ".join(map(str, inspect.get_annotations(thing).values()))))
    source = inspect.getsource(thing)
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign):
            names |= set(WORD.findall(ast.unparse(node.annotation)))
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            every = [*node.args.args, *node.args.kwonlyargs]
            annotations = [one.annotation for one in every if one.annotation] + [node.returns] * bool(node.returns)
            names |= {name for one in annotations for name in WORD.findall(ast.unparse(one))}
    return names


def types_of(page: ModuleType) -> dict[str, type]:
    kinds = {name: getattr(page, name) for name in page.__all__}
    return {name: kind for name, kind in kinds.items() if inspect.isclass(kind)}


@pytest.mark.parametrize("name", HOOKS)
def test_what_a_hook_names_is_on_the_page(name: str) -> None:
    assert named_by(HOOKS[name]) - ELSEWHERE <= set(PAGE.__all__)


@pytest.mark.parametrize("name", types_of(PAGE))
def test_what_a_protocol_or_a_context_names_is_on_the_page(name: str) -> None:
    kind = types_of(PAGE)[name]
    if dataclasses.is_dataclass(kind) or getattr(kind, "_is_protocol", False):
        assert named_by(kind) - ELSEWHERE <= set(PAGE.__all__)


@pytest.mark.parametrize("path", TEMPLATE, ids=lambda path: path.name)
def test_the_template_imports_nothing_of_ours_but_the_page(path: Path) -> None:
    allowed = {"callboard.plugins", "callboard.plugins.testing"}
    for node in ast.walk(ast.parse(path.read_text())):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            assert module.partition(".")[0] not in ("callboard", "engine", "server") or module in allowed, module


def test_every_check_of_the_kit_is_public() -> None:
    checks = {
        node.name
        for path in KIT
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
    }
    inner = {"check_ranks", "check_steps"}  # parts of the others
    assert checks - inner <= set(callboard.plugins.testing.__all__)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_function_keeps_its_parameters(name: str) -> None:
    function = getattr(PAGE, name, None) or getattr(callboard.plugins.testing, name)
    kept = PARAMETERS[name].split()
    assert list(inspect.signature(function).parameters)[: len(kept)] == kept


def test_every_function_is_listed_with_its_parameters() -> None:
    exported = [getattr(page, name) for page in (PAGE, callboard.plugins.testing) for name in page.__all__]
    assert {one.__name__ for one in exported if inspect.isfunction(one)} == set(PARAMETERS)
