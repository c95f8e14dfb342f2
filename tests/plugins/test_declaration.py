"""What plugins declare: read without running them, checked before they are, and every flaw named."""

import sys
from dataclasses import replace

import msgspec
import pytest

from engine.config import Config
from engine.plugins import declaration as module
from engine.plugins.declaration import Declaration, Multiples, read_declaration
from engine.plugins.hookspecs import API_VERSION, AttentionContext
from engine.plugins.manager import BUILTIN, Plugins, available_plugins, declared
from engine.types.errors import PluginError
from tests.plugins.conftest import Install

HOOK = "from engine.plugins.hookspecs import hookimpl\n"
HOOK += "@hookimpl\ndef callboard_eviction_strategy(context): return 'made'\n"
HERE = AttentionContext("cpu", "float32", page_size=16, num_heads=8, num_kv_heads=2, head_size=64, window=32)


@pytest.mark.parametrize("name", BUILTIN)
def test_every_built_in_declares_this_version(name: str) -> None:
    declaration = read_declaration(BUILTIN[name])
    assert declaration is not None, f'add CALLBOARD_PLUGIN = {{"api": {API_VERSION}}} to {BUILTIN[name]}'
    assert declaration.api == API_VERSION


@pytest.mark.parametrize("written", ["CALLBOARD_PLUGIN = {table}", "CALLBOARD_PLUGIN: dict[str, object] = {table}"])
def test_it_is_read_without_running_the_module_or_its_packages(install: Install, written: str) -> None:
    table = (
        '{"api": 1, "packages": ["nowhere"], "page_sizes": [16, 64], "head_sizes": {"multiple_of": 8, "at_most": 96}}'
    )
    broken = "raise RuntimeError('ran')\n"
    install(
        "acme",
        {"eviction.far": "acme_parts.inner.far"},
        {
            "acme_parts/__init__.py": broken,
            "acme_parts/inner/__init__.py": broken,
            "acme_parts/inner/far.py": broken + written.replace("{table}", table),
        },
    )
    (info,) = [info for info in available_plugins() if info.name == "eviction.far"]
    assert declared(info) == Declaration(
        api=1, packages=("nowhere",), page_sizes=(16, 64), head_sizes=Multiples(multiple_of=8, at_most=96)
    )
    assert "acme_parts" not in sys.modules


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (HOOK, r'does not say which plugin API .* must add to bad: CALLBOARD_PLUGIN = \{"api": 1\}'),
        (
            HOOK + 'CALLBOARD_PLUGIN = {"api": 2}\nraise RuntimeError("ran")\n',
            "written for plugin API 2; this callboard supports 1: upgrade it",
        ),
        (
            HOOK + 'CALLBOARD_PLUGIN = {"api": 0}\nraise RuntimeError("ran")\n',
            "written for plugin API 0; this callboard supports 1: upgrade acme",
        ),
        (HOOK + 'CALLBOARD_PLUGIN = {"api": "1"}\n', "CALLBOARD_PLUGIN in bad: Expected `int`, got `str`"),
        (HOOK + 'CALLBOARD_PLUGIN = {"api": 1, "divices": ["cpu"]}\n', "`divices`; keys: api, packages, devices"),
        (HOOK + "CALLBOARD_PLUGIN = dict(api=1)\n", "bad, line 4: CALLBOARD_PLUGIN is read without running"),
        ("def broken(:\n", "bad is not valid Python"),
    ],
)
def test_a_flaw_is_named_before_the_plugin_runs(install: Install, source: str, said: str) -> None:
    install("acme", {"eviction.bad": "bad"}, {"bad.py": source})
    with pytest.raises(PluginError, match=said) as refused:
        Plugins({"eviction": "bad"})
    assert "eviction.bad (acme 1.0)" in str(refused.value)


def test_a_module_that_is_not_there_is_named(install: Install) -> None:
    install("acme", {"eviction.gone": "acme_gone.eviction"}, {})
    with pytest.raises(PluginError, match=r"eviction\.gone \(acme 1\.0\): there is no module acme_gone"):
        Plugins({"eviction": "gone"})


def test_a_version_that_was_supported_last_is_still_taken(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "API_VERSION", 2)
    install("acme", {"eviction.old": "old"}, {"old.py": HOOK + 'CALLBOARD_PLUGIN = {"api": 1}\n'})
    assert Plugins({"eviction": "old"}).hook.callboard_eviction_strategy(context=None) == "made"


def test_a_module_without_source_declares_by_its_constant(install: Install) -> None:
    import py_compile

    for name, line in (("silent", ""), ("spoken", 'CALLBOARD_PLUGIN = {"api": 1}\n')):
        folder = install(f"acme-{name}", {f"eviction.{name}": name}, {f"{name}.py": HOOK + line})
        py_compile.compile(str(folder / f"{name}.py"), cfile=str(folder / f"{name}.pyc"))
        (folder / f"{name}.py").unlink()
    assert Plugins({"eviction": "spoken"}).hook.callboard_eviction_strategy(context=None) == "made"
    with pytest.raises(PluginError, match="does not say which plugin API"):
        Plugins({"eviction": "silent"})


@pytest.mark.parametrize(
    ("declaration", "reason"),
    [
        (Declaration(api=1, packages=("msgspec", "nowhere.at.all")), "package nowhere.at.all is not installed"),
        (Declaration(api=1, packages=("far | farther", "far | msgspec")), "package far | farther is not installed"),
        (Declaration(api=1, devices=("cuda",)), "device cpu, it takes cuda"),
        (Declaration(api=1, dtypes=("bfloat16", "float16")), "dtype float32, it takes bfloat16, float16"),
        (Declaration(api=1, head_sizes=(80, 128)), "head size 64, it takes 80, 128"),
        (Declaration(api=1, head_sizes=Multiples(24, 128)), "head size 64, it takes multiples of 24 up to 128"),
        (Declaration(api=1, page_sizes=Multiples(256, 256)), "page size 16, it takes multiples of 256 up to 256"),
        (Declaration(api=1, heads_per_kv_head=(1, 8)), "ratio of query heads to KV heads 4, it takes 1, 8"),
        (Declaration(api=1, window=False), "a sliding window of 32 tokens, it does none"),
        (Declaration(api=1, phases=("decode",)), "it does not serve prefill"),
    ],
)
def test_what_does_not_fit_is_a_reason(declaration: Declaration, reason: str) -> None:
    assert declaration.misfits(HERE) == [reason]


def test_pages_of_another_type_have_to_be_declared() -> None:
    int8 = replace(HERE, kv_dtype="int8")
    assert Declaration(api=1).misfits(int8) == ["kv.dtype int8, it takes float32"]
    eight_bits = Declaration(api=1, kv_dtypes=("fp8_e4m3",))
    assert eight_bits.misfits(int8) == ["kv.dtype int8, it takes float32, fp8_e4m3"]
    assert eight_bits.misfits(replace(int8, kv_dtype="fp8_e4m3")) == []


def test_latents_are_declared_by_name_whatever_sizes_keys_may_have() -> None:
    told = replace(HERE, num_heads=128, num_kv_heads=1, head_size=576, needs=("latents",))
    narrow = Declaration(api=1, head_sizes=(64,), heads_per_kv_head=(4,))
    without = "the model needs values that are a part of their keys (latent attention), which it does not do"
    assert narrow.misfits(told) == [without]
    assert msgspec.structs.replace(narrow, supports=("latents",)).misfits(told) == []
    for library in ("flashinfer", "xqa"):
        declared = read_declaration(BUILTIN[f"attention.{library}"])
        assert declared is not None
        assert without in declared.misfits(told)


def test_what_fits_or_is_not_known_is_none() -> None:
    wide = Declaration(
        api=1, packages=("msgspec",), devices=("cpu", "cuda"), head_sizes=Multiples(8, 64), page_sizes=(1, 16)
    )
    assert wide.misfits(HERE) == []
    unknown = AttentionContext("", "", page_size=0, num_heads=0, num_kv_heads=0, head_size=0)
    narrow = Declaration(
        api=1, devices=("cuda",), dtypes=("float16",), head_sizes=(1,), page_sizes=(2,), heads_per_kv_head=(3,)
    )
    assert narrow.misfits(unknown) == []


def test_the_configuration_can_name_every_page_size_of_the_kit() -> None:
    from engine.plugins.testing.attention_cases import PAGE_SIZES

    types = {one.name: one.type for one in msgspec.structs.fields(Config().kv)}
    sizes = types["page_size"].__args__[0].__args__
    assert set(PAGE_SIZES) <= set(sizes)
