"""The FlashAttention plugin on a CPU: every table, length and window it hands over, to one that computes by them."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.layers.attention import AttentionBackend
from engine.plugins.attention import flash_attn
from engine.plugins.attention.flash_attn import FlashAttentionOptions, callboard_attention_backend
from engine.plugins.attention.flash_attn.backend import FlashAttention
from engine.plugins.attention.flash_attn.kernels import FA2, FA3
from engine.plugins.attention.flash_attn.libraries import FA3_KEY_TILES, Situation, find, refusal
from engine.plugins.declaration import Declaration, convert_declaration
from engine.plugins.hookspecs import AttentionContext
from engine.plugins.manager import Plugins
from engine.plugins.selection import contenders, first_fit
from engine.types.errors import PluginError
from tests.attention import fake_flash_attn
from tests.attention.fake_flash_attn import FakeFlashAttention
from tests.attention.graph_rows import GraphRows
from tests.attention.signatures import (
    Call,
    Name,
    binds,
    definition_in,
    names,
    recorded,
    signature_in_source,
    signature_of,
    source_of,
    spell,
)
from tests.attention.test_flashinfer import MIXED, grown, padded, part_of
from tests.attention.test_torch_backend import SEQUENCE, Paged, paged, spec_of

FA2_MIXED = [(1, 1), (300, 1), (256, 1), (20, 20), (257, 7), (512, 2)]


class Rig:
    """The backend over one generation's functions."""

    def __init__(self, case: Paged, generation: int = 3, metadata: bool = True, invariant: bool = False) -> None:
        self.pool = case.pool
        self.fake = FakeFlashAttention(fewest_queries=2 if invariant else 1)
        if generation == 2:
            kernels: Any = FA2(case.spec, self.fake.fa2_with_kvcache, self.fake.fa2_varlen)
        else:
            schedule = self.fake.scheduler_metadata if metadata else None
            kernels = FA3(case.spec, case.pool, 8, self.fake.fa3_with_kvcache, schedule, invariant)
        self.backend = FlashAttention(case.spec, case.pool, kernels, invariant)

    def calls(self, name: str) -> list[dict[str, Any]]:
        return [arguments for called, arguments in self.fake.calls if called == name]

    def graph(self, num_rows: int, max_pages: int) -> GraphRows:
        """The backend in a graph of so many rows."""
        return GraphRows(self.backend, self.pool, num_rows, max_pages)

    def check(self, case: Paged, backend: AttentionBackend | None = None, num_rows: int = 0) -> None:
        """Run a step of ``case``, on a padded graph if num_rows is given, and compare it with the definition."""
        backend = backend or self.backend
        q_TNH = case.q_TNH
        if num_rows:
            q_TNH = torch.cat((q_TNH, q_TNH.new_ones(num_rows - len(q_TNH), *q_TNH.shape[1:])))
        with torch.inference_mode():
            backend.plan_step(case.batch)
            for layer in range(case.spec.num_layers):
                out_TNH = backend.attend(layer, q_TNH)
                assert out_TNH.shape == q_TNH.shape
                worst = (out_TNH[: len(case.q_TNH)].double() - case.expected(layer)).abs().max().item()
                assert worst <= 2e-6, f"layer {layer} differs by {worst}"


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (10, 2)])
@pytest.mark.parametrize("metadata", [True, False])
def test_mixed_ragged_batch_by_fa3(page_size: int, heads: tuple[int, int], metadata: bool):
    case = paged(spec_of(*heads, 8), MIXED, page_size, seed=1)
    rig = Rig(case, metadata=metadata)
    rig.check(case)
    assert len(rig.calls("metadata")) == 2 * metadata, "once a step for each part, not once a layer"


@pytest.mark.parametrize("metadata", [True, False])
def test_with_invariant_numerics_fa3_divides_no_keys_and_has_one_call_for_all_rows(metadata: bool):
    case = paged(spec_of(4, 2, 8), MIXED, 16, seed=1)
    rig = Rig(case, metadata=metadata, invariant=True)
    rig.check(case)
    decodes = paged(spec_of(4, 2, 8), [(30, 1), (7, 1)], 16, seed=2)
    alone = Rig(decodes, metadata=metadata, invariant=True)
    alone.check(decodes)
    assert len(rig.calls("fa3")) == len(alone.calls("fa3")) == case.spec.num_layers
    calls = rig.calls("fa3") + alone.calls("fa3") + rig.calls("metadata") + alone.calls("metadata")
    assert {one["num_splits"] for one in calls} == {1}
    # Of one query it might take another kernel, as nothing is hidden from it.
    assert {one["max_seqlen_q"] for one in alone.calls("fa3") + alone.calls("metadata")} == {2}


@pytest.mark.parametrize("metadata", [True, False])
def test_pages_in_float8_are_attended_to_in_float8(metadata: bool):
    """Queries are rounded as the pages' keys are; the result is the definition's of what is then multiplied."""
    case = paged(spec_of(4, 2, 16), MIXED, 16, seed=1, dtype=torch.bfloat16, kv_dtype="fp8_e4m3")
    rig = Rig(case, metadata=metadata)
    case.q_TNH[0, 0, 0] = 1000.0  # more than float8 has
    expected = replace(case, q_TNH=case.q_TNH.clamp(-448, 448).to(torch.float8_e4m3fn))
    with torch.inference_mode():
        rig.backend.plan_step(case.batch)
        for layer in range(case.spec.num_layers):
            out_TNH = rig.backend.attend(layer, case.q_TNH)
            assert out_TNH.dtype == torch.bfloat16
            error = (out_TNH.double() - expected.expected(layer)).abs()
            assert (error <= 2**-8 * (1 + expected.expected(layer).abs())).all()
    assert rig.fake.scheduled_dtypes == ({torch.float8_e4m3fn} if metadata else set())


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_mixed_ragged_batch_by_fa2(heads: tuple[int, int]):
    case = paged(spec_of(*heads, 8), FA2_MIXED, 256, seed=2)
    rig = Rig(case, 2)
    rig.check(case)
    assert [name for name, _ in rig.fake.calls] == ["fa2 decode", "fa2 prefill"] * 2


@pytest.mark.parametrize("window", [1, 5, 16, 40])
@pytest.mark.parametrize("first_window_layer", [0, 1])
def test_sliding_window(window: int, first_window_layer: int):
    case = paged(spec_of(4, 2, 8, window, first_window_layer), MIXED, 4, seed=3)
    Rig(case).check(case)
    case = paged(spec_of(2, 1, 4, window, first_window_layer), FA2_MIXED, 256, seed=3)
    Rig(case, 2).check(case)


def test_one_step_after_another_of_any_kind():
    case = paged(spec_of(4, 2, 8), [(30, 1), (64, 1), (9, 1), (33, 7), (50, 2), (12, 12)], 4, seed=4)
    rig = Rig(case)
    for first, last in ((0, 6), (0, 3), (3, 6), (1, 2), (2, 5), (0, 6), (4, 5)):
        rig.check(part_of(case, case.batch, first, last))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    sequences=st.lists(SEQUENCE, min_size=1, max_size=5),
    page_size=st.sampled_from([1, 4, 8]),
    window=st.sampled_from([0, 0, 3, 8, 64]),
    seed=st.integers(0, 1000),
)
def test_any_batch(sequences: list[tuple[int, int]], page_size: int, window: int, seed: int):
    case = paged(spec_of(2, 1, 4, window), sequences, page_size, seed)
    Rig(case).check(case)


def test_keys_are_divided_for_decode_rows_and_for_prompts_that_leave_the_gpu_idle():
    """Eight SMs and two KV heads with two query heads each: four tiles of 64 queries fill it."""
    for queries, num_splits in ((64, 0), (192, 0), (193, 1)):
        case = paged(spec_of(4, 2, 4), [(5, 1), (queries, queries)], 64, seed=5)
        rig = Rig(case)
        rig.check(case)
        splits = [call["num_splits"] for call in rig.calls("metadata")]
        assert splits == [0, num_splits], f"{queries} queries"
    rows = paged(spec_of(4, 2, 4), [(5, 1)] * 9, 64, seed=5)
    rig = Rig(rows)
    rig.check(rows)
    assert {call["num_splits"] for call in rig.calls("fa3")} == {0}, "each row's keys may be many"


@pytest.mark.parametrize("generation", [2, 3])
def test_rows_of_length_0_read_the_dump_page_and_stay_finite(generation: int):
    page_size = 256 if generation == 2 else 4
    case = paged(spec_of(4, 2, 8), MIXED[:3], page_size, seed=6)
    case.pool.data[:, :, case.pool.dump_page] = 0.5
    rig = Rig(case, generation)
    rig.backend.plan_step(padded(case, 2))
    out = rig.backend.attend(0, torch.ones(5, 4, 8))
    assert torch.equal(out[3:], torch.full_like(out[3:], 0.5))


@pytest.mark.parametrize("generation", [2, 3])
@pytest.mark.parametrize("window", [0, 9])
def test_a_captured_batch_of_fewer_rows_than_it_was_captured_for(generation: int, window: int):
    page_size = 256 if generation == 2 else 4
    case = paged(spec_of(4, 2, 8, window, 1), [(30, 1), (64, 1), (9, 1), (17, 1)], page_size, seed=7)
    rig = Rig(case, generation)
    graph = rig.graph(4, 16)
    for first, last in ((0, 4), (0, 2), (1, 4), (3, 4), (0, 4)):
        rig.check(part_of(case, case.batch, first, last), graph, num_rows=4)
    shorter = grown(case, [29, 3, 8, 1])
    rig.check(shorter, graph, num_rows=4)


@pytest.mark.parametrize("generation", [2, 3])
def test_rows_that_a_graph_is_not_given_read_the_dump_page_whatever_was_there_before(generation: int):
    page_size = 256 if generation == 2 else 4
    case = paged(spec_of(4, 2, 8), [(30, 1), (64, 1), (9, 1), (17, 1)], page_size, seed=7)
    case.pool.data[:, :, case.pool.dump_page] = 0.5
    graph = Rig(case, generation).graph(4, 32)
    for first, last in ((0, 4), (0, 2), (1, 4)):
        with torch.inference_mode():
            graph.plan_step(part_of(case, case.batch, first, last).batch)
            out = graph.attend(0, torch.ones(4, 4, 8))
        assert torch.equal(out[last - first :], torch.full_like(out[last - first :], 0.5))


@pytest.mark.parametrize("generation", [2, 3])
def test_a_graph_reads_the_same_memory_at_every_replay(generation: int):
    case = paged(spec_of(4, 2, 8, 9, 1), [(30, 1), (64, 1)], 256 if generation == 2 else 4, seed=8)
    rig = Rig(case, generation)
    graph = rig.graph(2, 16)
    for lengths in ([30, 64], [3, 5]):
        rig.check(grown(case, lengths), graph, num_rows=2)
    calls = rig.calls("fa3" if generation == 3 else "fa2 decode")
    once, again = calls[: len(calls) // 2], calls[len(calls) // 2 :]
    for one, other in zip(once, again, strict=True):
        for name in ("cache_seqlens", "page_table", "block_table", "cu_seqlens_q"):
            if name in one:
                assert one[name].data_ptr() == other[name].data_ptr(), name


# ---- libraries and the hook ----------------------------------------------------------------------

HOPPER = Situation(hopper=True, page_size=16, head_size=128, whole_pages=False)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with a Hopper GPU and the libraries that a test adds; none at first."""
    machine = SimpleNamespace(fake=FakeFlashAttention(), capability=(9, 0))
    for name in ("flash_attn", "flash_attn_interface", "flash_attn_3", "sgl_kernel", "sgl_kernel.flash_attn"):
        monkeypatch.setitem(sys.modules, name, None)

    def add(name: str, **members: Any) -> None:
        package = name.partition(".")[0]
        monkeypatch.setitem(sys.modules, package, SimpleNamespace(__version__=f"{package} version", __path__=[]))
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__version__=f"{package} version", **members))

    fake = machine.fake
    fa2 = {"flash_attn_with_kvcache": fake.fa2_with_kvcache, "flash_attn_varlen_func": fake.fa2_varlen}
    fa3 = {"flash_attn_with_kvcache": fake.fa3_with_kvcache, "get_scheduler_metadata": fake.scheduler_metadata}
    machine.add_fa2 = lambda: add("flash_attn", **fa2)
    machine.add_fa3 = lambda name="sgl_kernel.flash_attn": add(name, **fa3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: machine.capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=6))
    return machine


def context(**changes: object) -> AttentionContext:
    shape = {"page_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_size": 64}
    return AttentionContext(**{"device": "cuda", "dtype": "bfloat16", **shape, **changes})


def test_fa3_is_taken_before_fa2_and_upstreams_before_others(installed: Any):
    for add, module, generation in (
        (installed.add_fa2, None, 0),
        (installed.add_fa3, "sgl_kernel.flash_attn", 3),
        (lambda: installed.add_fa3("flash_attn_interface"), "flash_attn_interface", 3),
    ):
        add()
        library, _ = find((3, 2), HOPPER)
        assert (library and library.module, library.generation if library else 0) == (module, generation)
    library, reasons = find((3, 2), replace(HOPPER, page_size=512))
    assert library is not None
    assert (library.module, library.version) == ("flash_attn", "flash_attn version")
    assert reasons == ["FA3 may read unwritten slots of pages of a multiple of 128 tokens (see option whole_pages)"]


def test_page_rules():
    assert not refusal(2, replace(HOPPER, page_size=512))
    assert refusal(2, replace(HOPPER, page_size=128)) == "FA2 needs pages of a multiple of 256 tokens"
    invariant = replace(HOPPER, page_size=512, invariant=True)
    assert "heads above 192" in refusal(3, replace(invariant, page_size=16, head_size=256, window=True))
    assert not refusal(3, replace(invariant, page_size=16, head_size=256))
    assert not refusal(3, replace(invariant, page_size=16, head_size=192, window=True))
    assert refusal(2, invariant) == "FA2 splits the keys of a decode row depending on the rest of a step"
    assert refusal(3, replace(HOPPER, hopper=False)) == "FA3 is for Hopper GPUs"
    float8 = replace(HOPPER, page_size=256, kv_dtype="fp8_e4m3")
    assert refusal(2, float8) == "FA2 does not read fp8_e4m3 pages"
    assert not refusal(3, float8)
    assert "multiple of 224" in refusal(3, replace(float8, page_size=224))
    assert "multiple of 16" in refusal(3, replace(float8, page_size=16, head_size=88))
    for page_size in (1, 16, 32, 64):
        assert not refusal(3, replace(HOPPER, page_size=page_size))
    assert not refusal(3, replace(HOPPER, page_size=256, whole_pages=True))
    assert "multiple of 64" in refusal(3, replace(HOPPER, page_size=64, head_size=256))
    assert max(FA3_KEY_TILES) == 256


def test_latents_and_sinks_are_for_the_builds_that_have_them(installed: Any):
    latents = replace(HOPPER, head_size=576, needs=("latents",))
    assert not refusal(3, latents)
    assert "multiple of 64 tokens" in refusal(3, replace(latents, page_size=64))
    assert not refusal(3, replace(latents, page_size=64, whole_pages=True))
    assert not refusal(3, replace(latents, page_size=64, head_size=320))
    assert "multiple of 112 tokens" in refusal(3, replace(latents, page_size=112, head_size=320))
    assert "latents in 16 bits alone" in refusal(3, replace(latents, kv_dtype="fp8_e4m3"))
    sinks = replace(HOPPER, needs=("layer_windows", "sinks"))
    for situation in (latents, sinks):
        assert refusal(2, replace(situation, page_size=256)) == "FA2 has no latents and no sinks"
    installed.add_fa3("flash_attn_interface")
    library, reasons = find((3,), sinks)
    assert library is None
    assert reasons[0] == "flash_attn_interface has no attention sinks"
    assert find((3,), latents)[0] is not None
    installed.add_fa3("sgl_kernel.flash_attn")
    library, _ = find((3,), sinks)
    assert library is not None
    assert library.module == "sgl_kernel.flash_attn"


@pytest.mark.parametrize(("generation", "page_size"), [(2, 256), (3, 16)])
def test_the_hook_gives_a_factory_that_tries_every_kernel_out(installed: Any, generation: int, page_size: int):
    (installed.add_fa2 if generation == 2 else installed.add_fa3)()
    case = paged(spec_of(4, 2, 64, 7, 1), MIXED, page_size, seed=10)
    case.pool.data[:, :, case.pool.dump_page] = 0
    backend = callboard_attention_backend(context(window=7, page_size=page_size))(case.spec, case.pool)
    called = {name for name, _ in installed.fake.calls}
    assert called == ({"fa2 decode", "fa2 prefill"} if generation == 2 else {"fa3", "metadata"})
    if generation == 3:
        calls = [call for name, call in installed.fake.calls if name == "fa3"]
        assert {(call["num_splits"], call["window_size"]) for call in calls} == {
            (num_splits, window) for num_splits in (0, 1) for window in ((-1, -1), (6, 0))
        }
    with torch.inference_mode():
        backend.plan_step(case.batch)
        assert (backend.attend(1, case.q_TNH).double() - case.expected(1)).abs().max() <= 2e-6


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "device cpu, it takes cuda"),
        ({"dtype": "float32"}, "dtype float32, it takes bfloat16, float16"),
        ({"head_size": 100}, "head size 100, it takes multiples of 8 up to 256"),
        ({"head_size": 512}, "head size 512, it takes multiples of 8 up to 256"),
    ],
)
def test_what_it_declares_keeps_it_from_being_asked(changes: dict[str, object], reason: str):
    assert reason in convert_declaration("flash_attn", flash_attn.CALLBOARD_PLUGIN).misfits(context(**changes))


def test_an_implementation_that_there_is_not_is_a_plugin_error():
    with pytest.raises(PluginError, match=r"Invalid enum value 'fa4'.*implementation, whole_pages"):
        callboard_attention_backend(context(options={"implementation": "fa4"}))


def test_without_a_library_the_error_says_what_was_tried_and_what_helps(installed: Any):
    with pytest.raises(PluginError) as refused:
        callboard_attention_backend(context())
    for part in (
        "kv.page_size=16",
        "flash_attn_interface: ",
        "sgl_kernel.flash_attn: ",
        "FA2 needs pages of a multiple of 256 tokens",
        "pip install --no-build-isolation 'callboard[flash-attn]'",
        "set kv.page_size to 16, 32 or 64 for FA3, or to 256 for FA2",
        "plugins.attention=torch",
    ):
        assert part in str(refused.value)
    installed.add_fa2()
    with pytest.raises(PluginError, match="FA2 needs pages of a multiple of 256 tokens"):
        callboard_attention_backend(context(options={"implementation": "fa2"}))
    installed.capability = (7, 0)
    with pytest.raises(PluginError, match=r"needs compute capability 8\.0, this GPU has 7\.0"):
        callboard_attention_backend(context())


def test_a_kernel_that_fails_at_start_is_a_plugin_error_with_its_reason(installed: Any):
    installed.add_fa3()
    case = paged(spec_of(4, 2, 64), [(3, 1)], 16, seed=11)
    installed.fake.scheduler_metadata = None

    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("This flash attention build does not support headdim 64")

    sys.modules["sgl_kernel.flash_attn"].flash_attn_with_kvcache = fails
    with pytest.raises(PluginError, match=r"trial run \(RuntimeError: This flash.*headdim 64\); set plugins"):
        callboard_attention_backend(context())(case.spec, case.pool)


def test_options_have_the_documented_defaults():
    assert FlashAttentionOptions() == FlashAttentionOptions("auto", False)


# ---- signatures ----------------------------------------------------------------------------------

LIBRARIES = ("flash_attn", "flash_attn_interface", "sgl_kernel")
NAMES = [name for one in LIBRARIES for name in names(one) if name[0] != "sgl_kernel.flash_mla"]


def every_call() -> set[Call]:
    calls: set[Call] = set()
    for generation, sequences, page_size in ((2, FA2_MIXED, 256), (3, MIXED, 4)):
        case = paged(spec_of(4, 2, 8, 9, 1), sequences, page_size, seed=12)
        rig = Rig(case, generation)
        rig.check(case)
        rows = part_of(case, case.batch, 0, 3)
        rig.check(rows, rig.graph(3, 16), num_rows=3)
        calls |= rig.fake.made
    return calls


def test_every_function_that_is_recorded_is_called_and_its_calls_bind():
    """The stand-in binds every call of every test; here are all ways through the plugin."""
    assert {name for name, *_ in every_call()} == set(NAMES)


@pytest.mark.parametrize(
    ("changed", "parameter"),
    [
        (("flash_attn.flash_attn_interface", "flash_attn_with_kvcache"), "block_table"),
        (("flash_attn.flash_attn_interface", "flash_attn_varlen_func"), "max_seqlen_k"),
        (("flash_attn_interface", "flash_attn_with_kvcache"), "page_table"),
        (("flash_attn_interface", "get_scheduler_metadata"), "num_heads_kv"),
        (("sgl_kernel.flash_attn", "flash_attn_with_kvcache"), "scheduler_metadata"),
        (("sgl_kernel.flash_attn", "get_scheduler_metadata"), "page_size"),
    ],
)
def test_a_function_that_changes_is_noticed(changed: Name, parameter: str, monkeypatch: pytest.MonkeyPatch):
    before = recorded(changed)
    mutant = before.replace(parameters=[one for one in before.parameters.values() if one.name != parameter])
    assert mutant != before
    monkeypatch.setattr(fake_flash_attn, "recorded", lambda name: mutant if name == changed else recorded(name))
    with pytest.raises(TypeError, match="argument"):
        every_call()


@pytest.mark.parametrize("name", NAMES, ids=".".join)
def test_every_call_is_one_that_the_installed_library_takes(name: Name):
    """Read from its source: importing it needs CUDA."""
    if source_of(name[0]) is None:
        pytest.skip(f"{name[0]} is not installed")
    calls = [call for call in every_call() if call[0] == name]
    assert calls
    for call in calls:
        binds(signature_in_source(name), call)


def test_a_library_is_read_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "some_library"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('needs a GPU')")
    (package / "kernels.py").write_text(
        "import nothing\nclass Wrapper:\n    def run(self, q, /, k: int, *rest, out=7, **more): ...\n"
        "@overload\ndef plan(a): ...\ndef plan(a, b=1, *, c, d=2): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for function, expected in (
        ("Wrapper.run", "(self, q, /, k, *rest, out=None, **more)"),
        ("plan", "(a, b=None, *, c, d=None)"),
    ):
        found = signature_in_source(("some_library.kernels", function))
        assert str(found) == expected
        again = f"def f({', '.join(spell(found))}): ..."
        assert signature_of(definition_in(again, "f")) == found
    with pytest.raises(LookupError, match="there is no replan"):
        signature_in_source(("some_library.kernels", "replan"))
    assert source_of("no_such_library") is None


def test_auto_does_not_take_it_for_pages_in_float8(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Declaration, "missing_packages", lambda self: [])
    for kv_dtype, taken in (("", True), ("fp8_e4m3", False)):
        context = AttentionContext("cuda", "bfloat16", 16, 16, 8, 128, kv_dtype=kv_dtype)
        found, passed_over = contenders(Plugins({"attention": "auto"}), context)
        assert ("flash_attn" in {one.name for one in found}) is taken
        assert taken or passed_over["flash_attn"].endswith("queries to fp8_e4m3 as well; name it to have that")
        others = dict.fromkeys(("flashinfer", "triton", "xqa"), "not this one")
        assert first_fit(Plugins({"attention": "auto"}).known, context, others)[0].short == (
            "flash_attn" if taken else "torch"
        )
        named, _ = contenders(Plugins({"attention": "flash_attn"}), context)
        assert "flash_attn" in {one.name for one in named}
