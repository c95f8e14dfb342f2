"""Which attention backend serves: by name, by phase, or by itself; and what is said when it cannot."""

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.config import Config, build_config
from engine.plugins import manager, selection
from engine.plugins.hookspecs import AttentionContext
from engine.plugins.manager import Plugins
from engine.plugins.selection import check_named, choose_attention, expected_context
from engine.settings.attention_names import AttentionNames
from engine.types.errors import PluginError
from tests.plugins.conftest import Install

CPU = AttentionContext("cpu", "float32", page_size=16, num_heads=8, num_kv_heads=2, head_size=64)
CUDA = replace(CPU, device="cuda", dtype="bfloat16")
HOOK = """
from engine.plugins.hookspecs import hookimpl
CALLBOARD_PLUGIN = {declaration}

def factory(spec, pool): raise NotImplementedError

@hookimpl
def callboard_attention_backend(context):
    asked.append(context)
    {body}

asked = []
"""
Publish = Callable[..., None]


@pytest.fixture
def publish(install: Install) -> Publish:
    """publish(name, body of the hook, **declared): an attention backend of acme, with a module of the same name."""

    def publish(name: str, body: str = "return factory", **declared: object) -> None:
        source = HOOK.replace("{declaration}", repr({"api": 1, **declared})).replace("{body}", body)
        install(f"acme-{name}", {f"attention.{name}": f"acme_{name}"}, {f"acme_{name}.py": source})

    return publish


@pytest.fixture
def built_in(publish: Publish, monkeypatch: pytest.MonkeyPatch) -> Publish:
    """The same as if it came with callboard, under the first names of the order for GPUs."""

    def built_in(name: str, body: str = "return factory", **declared: object) -> None:
        publish(f"{name}_module", body, **declared)
        table = {**manager.BUILTIN, f"attention.{name}": f"acme_{name}_module"}
        monkeypatch.setattr(manager, "BUILTIN", table)

    monkeypatch.setattr(manager, "BUILTIN", {"attention.torch": "engine.plugins.attention.torch"})
    return built_in


def asked(name: str) -> list[AttentionContext]:
    return __import__(f"acme_{name}").asked


def choose(attention: str | AttentionNames, context: AttentionContext = CPU, **options: dict[str, object]) -> list:
    tables = {f"attention.{name}": table for name, table in options.items()}
    return [
        (choice.info.short, choice.phases)
        for choice in choose_attention(Plugins({"attention": attention}, options=tables), context)
    ]


BOTH = ("prefill", "decode")


def test_one_name_serves_both_phases_and_gets_its_own_options(publish: Publish) -> None:
    publish("first")
    assert choose("first", first={"a": 1}, torch={"b": 2}) == [("first", BOTH)]
    assert asked("first") == [replace(CPU, options={"a": 1})]


def test_two_names_are_asked_for_a_phase_each(publish: Publish) -> None:
    publish("first", phases=["prefill"])
    publish("second", phases=["decode"])
    assert choose(AttentionNames(prefill="first", decode="second"), second={"a": 1}) == [
        ("first", ("prefill",)),
        ("second", ("decode",)),
    ]
    assert asked("first") == [replace(CPU, phases=("prefill",))]
    assert asked("second") == [replace(CPU, phases=("decode",), options={"a": 1})]


def test_two_equal_names_are_one_backend_also_when_one_came_by_itself() -> None:
    assert choose(AttentionNames(prefill="torch", decode="torch")) == [("torch", BOTH)]
    assert choose(AttentionNames(prefill="auto", decode="torch")) == [("torch", BOTH)]


def test_auto_on_a_cpu_is_torch() -> None:
    assert choose("auto") == [("torch", BOTH)]


def test_auto_takes_the_first_that_fits_and_says_why_not_the_others(
    built_in: Publish, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    built_in("flashinfer", packages=["nowhere"])
    built_in("flash_attn", page_sizes=[256])
    built_in("triton", devices=["cuda"])
    assert choose("auto", CUDA) == [("triton", BOTH)]
    assert caplog.messages[-1] == (
        "plugin: attention.triton for prefill and decode (auto on cuda / flashinfer: package nowhere is not installed"
        " / flash_attn: page size 16, it takes 256)"
    )
    assert choose("auto", replace(CUDA, page_size=256)) == [("flash_attn", BOTH)]
    assert choose("auto") == [("torch", BOTH)]


def test_auto_passes_over_what_refuses_raises_or_cannot_be_imported(
    built_in: Publish, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    built_in("flashinfer", "from engine.types.errors import PluginError; raise PluginError('too old a GPU')")
    built_in("flash_attn", "return 1 / 0")
    built_in("triton", "return factory\nimport nowhere_at_all")
    assert choose("auto", CUDA) == [("torch", BOTH)]
    assert all(part in caplog.messages[-1] for part in ("too old a GPU", "ZeroDivisionError", "nowhere_at_all"))


def test_auto_is_decided_for_each_phase(built_in: Publish) -> None:
    built_in("flashinfer", phases=["decode"])
    assert choose(AttentionNames(), CUDA) == [("torch", BOTH)], "one wish for both phases is one backend"
    split = AttentionNames(prefill="torch", decode="auto")
    assert choose(split, CUDA) == [("torch", ("prefill",)), ("flashinfer", ("decode",))]


def test_auto_never_takes_what_another_distribution_publishes(
    publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "PREFERRED", {"cpu": ("ours", "torch")})
    publish("ours")
    assert choose("auto") == [("torch", BOTH)]


def test_if_nothing_can_run_every_reason_is_said() -> None:
    with pytest.raises(PluginError, match="no attention backend can run on cpu: torch: dtype int4, it takes float32"):
        choose("auto", replace(CPU, dtype="int4"))


@pytest.mark.parametrize(
    ("body", "declared", "said"),
    [
        ("return factory", {"devices": ["cuda"]}, r"cannot run here: device cpu, it takes cuda"),
        ("return factory", {"page_sizes": [256]}, r"cannot run here: page size 16, it takes 256"),
        ("return factory", {"head_sizes": [80], "heads_per_kv_head": [5]}, r"head size 64.*; ratio .* 4, it takes 5"),
        ("return factory", {"phases": ["decode"]}, r"it does not serve prefill"),
        ("from engine.types.errors import PluginError; raise PluginError('no')", {}, r"\(acme-bad 1\.0\): no"),
        ("raise ValueError('planted')", {}, r"raised ValueError\('planted'\) in callboard_attention_backend"),
        ("return None", {}, r"built no attention backend: it must implement callboard_attention_backend"),
        ("return 3", {}, r"must .* return a callable \(spec, pool\), not 3"),
    ],
)
def test_what_cannot_run_is_named_with_what_can(
    publish: Publish, body: str, declared: dict[str, object], said: str
) -> None:
    publish("bad", body, **declared)
    with pytest.raises(PluginError, match=f"plugin attention.bad .*{said}.*; can run here: tiles, torch"):
        choose("bad")


def test_a_missing_package_is_found_before_the_plugin_is_imported(publish: Publish) -> None:
    publish("bad", "return factory\nraise RuntimeError", packages=["nowhere"])
    publish("worse", "return factory", packages=["nothing"])
    expected = (
        r"attention\.bad .* needs nowhere, which is not installed; install it.*; available: .*torch.*; "
        r"not here: .*worse \(needs nothing\)"
    )
    with pytest.raises(PluginError, match=expected):
        Plugins({"attention": "bad"})


def test_what_is_known_early_is_checked_early(publish: Publish) -> None:
    publish("paged", page_sizes=[64])
    publish("gpu", devices=["cuda"], heads_per_kv_head=[1])
    config = build_config(Config(), {"device": {"kind": "cpu"}})
    context = expected_context(config, None)
    assert (context.device, context.dtype, context.page_size, context.head_size) == ("cpu", "", 16, 0)
    check_named(Plugins({"attention": "torch"}), context)
    check_named(Plugins({"attention": "auto"}), context)
    with pytest.raises(PluginError, match=r"attention\.paged .*page size 16, it takes 64; can run here: tiles, torch"):
        check_named(Plugins({"attention": AttentionNames(prefill="torch", decode="paged")}), context)
    with pytest.raises(PluginError, match=r"attention\.gpu .*device cpu, it takes cuda; can run here: tiles, torch"):
        check_named(Plugins({"attention": "gpu"}), context)
    check_named(Plugins({"attention": "gpu"}), expected_context(Config(), None))
