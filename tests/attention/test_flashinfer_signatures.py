"""Every call that the plugin makes is one that FlashInfer takes: as recorded, on any machine, and as installed.

FlashInfer's Python is imported where it is installed, which needs no GPU; ``make signatures`` installs it beside the
virtual environment, and then nothing of this file is skipped.
"""

import functools
import inspect
import re
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from engine.plugins.attention.flashinfer import CUDA_CORE_GROUPS
from engine.plugins.attention.flashinfer.kernels import DECODE_PLAN_LENGTH, STAGING, PagedAppend
from engine.plugins.attention.xqa import XQAAttention
from tests.attention import fake_flashinfer as fake
from tests.attention.signatures import Call, Name, as_recorded, binds, libraries, names, recorded
from tests.attention.test_flashinfer import MIXED, Rig, grown, part_of
from tests.attention.test_torch_backend import paged, spec_of

NAMES = names("flashinfer")
DECODE, PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"


def every_call() -> set[Call]:
    """Of every way through the plugins: steps, replays that plan fast, stores, rows by XQA."""
    calls: set[Call] = set()
    for tensor_cores in (False, True):
        case = paged(spec_of(4, 2, 8, 9, 1), MIXED, 4, seed=1)
        rig = Rig(case, tensor_cores)
        rig.check(case)
        rows = part_of(case, case.batch, 0, 3)
        graph = rig.graph(3, 16)
        for lengths in ([1, 30, 60], [1, 37, 64]):
            rig.check(grown(rows, lengths), graph, num_rows=3)
        slots = torch.arange(len(case.q_TNH))
        PagedAppend(rig.library, case.pool)(0, case.q_TNH[:, :2], case.q_TNH[:, 2:], slots)
        wide = paged(spec_of(4, 2, 16), [(1, 1), (37, 1)], 16, seed=1)
        attention = XQAAttention(rig.library, wide.spec, wide.pool)
        attention.plan_step(wide.batch)
        attention.attend(0, wide.q_TNH)
        calls |= rig.library.made
    return calls


made = functools.cache(every_call)


def test_what_is_recorded_is_what_is_called():
    assert {name for name, *_ in made()} == set(NAMES)


@pytest.mark.parametrize(
    ("module", "function", "parameter"),
    [
        ("decode", f"{DECODE}.__init__", "paged_kv_indices_buffer"),
        ("decode", f"{DECODE}.plan", "last_page_len"),
        ("decode", f"{DECODE}._plan_impl", "seq_lens"),
        ("decode", f"{DECODE}.run", "out"),
        ("decode", f"{DECODE}.reset_workspace_buffer", "int_workspace_buffer"),
        ("decode", "fast_decode_plan", "global_override_indptr_cpu"),
        ("decode", "xqa_batch_decode_with_kv_cache", "bmm1_scale"),
        ("prefill", f"{PREFILL}.__init__", "backend"),
        ("prefill", f"{PREFILL}.plan", "paged_kv_last_page_len"),
        ("prefill", f"{PREFILL}.run", "out"),
        ("page", "append_paged_kv_cache", "positions"),
    ],
)
def test_a_function_that_changes_is_noticed(
    module: str, function: str, parameter: str, monkeypatch: pytest.MonkeyPatch
):
    """The mutants that prove that calls are bound: one parameter is gone, or another one must be given."""
    changed = (f"flashinfer.{module}", function)
    before = recorded(changed)
    kept = [one for one in before.parameters.values() if one.name != parameter]
    assert len(kept) == len(before.parameters) - 1
    new = inspect.Parameter("new", inspect.Parameter.KEYWORD_ONLY)
    last = [one for one in before.parameters.values() if one.kind == one.VAR_KEYWORD]
    more = [*(one for one in before.parameters.values() if one not in last), new, *last]
    for mutant in (before.replace(parameters=kept), before.replace(parameters=more)):
        monkeypatch.setattr(fake, "recorded", lambda name, mutant=mutant: mutant if name == changed else recorded(name))
        if mutant.parameters.keys() >= {"kwargs"} and parameter not in mutant.parameters:
            continue  # takes anything by name, and hands it to a function that is bound as well
        with pytest.raises(TypeError, match="argument"):
            every_call()


# ---- the package, where it is installed ------------------------------------------------------------


@pytest.fixture(scope="module")
def flashinfer() -> ModuleType:
    if find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed")
    return import_module("flashinfer")


def in_package(name: Name) -> inspect.Signature:
    function: Callable[..., Any] = attrgetter(name[1])(import_module(name[0]))
    return inspect.signature(inspect.unwrap(function))


@pytest.mark.parametrize("name", NAMES, ids=".".join)
def test_every_call_is_one_that_the_package_takes(flashinfer: ModuleType, name: Name):
    calls = [call for call in made() if call[0] == name]
    assert calls
    for call in calls:
        binds(in_package(name), call)


@pytest.mark.parametrize("name", NAMES, ids=".".join)
def test_what_is_recorded_is_what_the_package_of_that_version_has(flashinfer: ModuleType, name: Name):
    version = libraries()["flashinfer"]["version"]
    if flashinfer.__version__ != version:
        pytest.skip(f"this is FlashInfer {flashinfer.__version__}, recorded was {version}")
    assert as_recorded(in_package(name)) == recorded(name)


def test_the_functions_are_where_the_plugin_takes_them_from(flashinfer: ModuleType):
    for name in (DECODE, PREFILL, "append_paged_kv_cache", "decode.fast_decode_plan"):
        assert callable(attrgetter(name)(flashinfer)), name


def test_the_public_plan_hands_everything_on(flashinfer: ModuleType):
    source = inspect.getsource(getattr(flashinfer, DECODE).plan)
    assert re.search(r"self\._plan_impl\([^)]*\*\*kwargs", source)


@pytest.mark.parametrize("kind", [DECODE, PREFILL])
def test_plans_are_written_where_a_buffer_is_lent(flashinfer: ModuleType, kind: str):
    wrapper = getattr(flashinfer, kind)
    built, planned = inspect.getsource(wrapper.__init__), inspect.getsource(wrapper)
    assert f"self.{STAGING} = torch.empty" in built
    # Both are read at each plan, not once, so that lending another one has an effect.
    assert planned.count(f"self.{STAGING},") >= 1


def test_the_fast_plan_takes_the_lent_buffer_too_and_copies_no_lists(flashinfer: ModuleType):
    source = inspect.getsource(inspect.unwrap(flashinfer.decode.fast_decode_plan))
    assert f"self.{STAGING}," in source
    assert "_paged_kv_indptr_buf.copy_" not in source


def header(flashinfer: ModuleType, *path: str) -> str:
    return Path(flashinfer.__file__ or "").parent.joinpath("data", "include", "flashinfer", *path).read_text()


def test_the_last_number_of_a_decode_plan_says_whether_rows_are_split(flashinfer: ModuleType):
    plan = header(flashinfer, "attention", "scheduler.cuh").partition("struct DecodePlanInfo")[2]
    numbers = re.search(r"ToVector\(\) const \{\s*return \{([^}]*)\}", plan)
    assert numbers is not None
    listed = [name.strip() for name in numbers[1].split(",")]
    assert (len(listed), listed[-1]) == (DECODE_PLAN_LENGTH, "split_kv")


def test_the_ratios_of_heads_that_decoding_without_tensor_cores_is_built_for(flashinfer: ModuleType):
    macro = header(flashinfer, "utils.cuh").partition("#define DISPATCH_GQA_GROUP_SIZE")[2].partition("#define")[0]
    assert tuple(map(int, re.findall(r"group_size == (\d+)", macro))) == CUDA_CORE_GROUPS


def test_a_place_is_found_by_the_page_list_of_its_sequence(flashinfer: ModuleType):
    """What ``PagedAppend`` relies on: places come from the list's start and the position, and from nothing else."""
    found = re.search(
        r"divmod\(paged_kv\.indptr\[batch_indices\[i\]\] \* paged_kv\.page_size \+ positions\[i\],",
        header(flashinfer, "page.cuh"),
    )
    assert found
