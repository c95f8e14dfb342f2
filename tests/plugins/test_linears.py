"""Linear kernels: every built-in by the kit, kernels that the kit must refuse, and which one a start chooses."""

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from callboard import LLM, SamplingParams
from engine.checkpoints.checkpoint import resolve_checkpoint
from engine.checkpoints.quantization import Quantization
from engine.config import Config, build_config
from engine.execution.device import instruction_sets
from engine.kernels.panels import PanelKind, products
from engine.layers.packing import Linears
from engine.models import loader
from engine.plugins.comm.local import LocalComm
from engine.plugins.declaration import Declaration, read_declaration
from engine.plugins.families import read_model
from engine.plugins.hookspecs import LinearContext
from engine.plugins.linear import fbgemm_fp16, fbgemm_int8, onednn, panels, torch_fp8, torch_int4, triton_int8
from engine.plugins.linear import torch as torch_plugin
from engine.plugins.linears import INVARIANT, PREFERRED, check_linear_fits, linear_context
from engine.plugins.manager import BUILTIN, Plugins
from engine.plugins.proof.findings import ConformanceError
from engine.plugins.testing.linear import check_linear
from engine.plugins.testing.steps import Driver
from engine.plugins.weight_type import kept_type
from engine.startup.linear_race import LinearRace
from engine.startup.linears import choose_linear, handling, widens
from engine.types.errors import PluginError
from tests.models.checkpoints import build, reference_logits, save

CPU = LinearContext("cpu", "float32", checkpoint_dtype="float32", instruction_sets=("avx2",))
KERNELS = sorted(name for name in BUILTIN if name.startswith("linear."))
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
needs_avx2 = pytest.mark.skipif("avx2" not in instruction_sets(), reason="FBGEMM needs AVX2")
needs_panels = pytest.mark.skipif(products() is None, reason="there is no C compiler, or no AVX2")


def declaration(name: str) -> Declaration:
    declared = read_declaration(BUILTIN[name])
    assert declared is not None
    return declared


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", KERNELS)
def test_a_built_in_is_right(name: str, device: str) -> None:
    declares = declaration(name)
    # A GPU's kernels have a slow form for CPUs in torch, which shows that they are called rightly.
    if device == "cuda" and device not in (declares.devices or DEVICES):
        pytest.skip("for CPUs")
    if device == "cpu" and name == "linear.torch_fp8_block":
        pytest.skip("torch has its product on Hopper alone; tests/plugins/test_torch_fp8_block.py has a stand-in")
    if device == "cpu" and name.startswith("linear.triton"):
        pytest.skip("tests/kernels/interpreted takes it through the kit in Triton's interpreter")
    if declares.instruction_sets and not set(declares.instruction_sets) & set(instruction_sets()):
        pytest.skip(f"needs {declares.instruction_sets}")
    if name == "linear.panels" and products() is None:
        pytest.skip("needs a C compiler")
    check_linear(importlib.import_module(BUILTIN[name]).callboard_linear, declares, device)


def test_every_built_in_has_its_place_in_the_order() -> None:
    assert {f"linear.{name}" for name in (*PREFERRED, *INVARIANT)} == set(KERNELS)


class Flawed:
    """A kernel that is right but for one thing."""

    element_bytes = 4.0

    def __init__(self, flaw: str) -> None:
        self.flaw = flaw

    def pack(self, weight_OI: torch.Tensor) -> "FlawedWeight":
        return FlawedWeight(self.flaw, weight_OI)


class FlawedWeight:
    def __init__(self, flaw: str, weight_OI: torch.Tensor) -> None:
        self.flaw = flaw
        self.weight = weight_OI if flaw == "shares memory" else weight_OI.clone()
        self.nbytes = 1000 if flaw == "lies about memory" else weight_OI.nbytes

    def __call__(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        if self.flaw == "fails on no rows" and not len(x_TI):
            raise RuntimeError("no rows")
        if self.flaw == "forgets the bias":
            bias_O = None
        if self.flaw == "writes its input":
            x_TI.mul_(1.0001)
        if self.flaw == "one scale per batch":
            step = x_TI.abs().max() / 127 if len(x_TI) else 1
            x_TI = (x_TI / step).round() * step
        if self.flaw == "saturates":
            return F.linear(x_TI, self.weight, bias_O).clamp(-1000, 1000)
        if self.flaw == "depends on the batch" and len(x_TI) > 100:
            return F.linear(x_TI.double(), self.weight.double(), None if bias_O is None else bias_O.double()).to(x_TI)
        return F.linear(x_TI, self.weight, bias_O)


@pytest.mark.parametrize(
    ("flaw", "case"),
    [
        ("shares memory", "values"),
        ("lies about memory", "memory"),
        ("fails on no rows", "raised RuntimeError: no rows"),
        ("forgets the bias", "with a bias"),
        ("writes its input", "has changed its input"),
        ("one scale per batch", "next to a row 1000 times larger"),
        ("saturates", "all elements at the largest"),
        ("depends on the batch", "the same bits in every batch"),
    ],
)
def test_the_kit_finds_a_flaw(flaw: str, case: str) -> None:
    kind = "int8" if flaw == "one scale per batch" else "none"
    declares = Declaration(api=1, dtypes=("float32",), quantizations=(kind,), invariant=True)
    with pytest.raises(ConformanceError, match=case):
        check_linear(lambda context: Flawed(flaw), declares)


@needs_avx2
def test_float16_takes_what_it_does_not_round_and_leaves_the_rest_to_onednn() -> None:
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    exact, asked = fbgemm_fp16.Fp16(exact=True), fbgemm_fp16.Fp16(exact=False)
    assert isinstance(exact.pack(weight.bfloat16().float()), fbgemm_fp16.HalfWeight)
    assert isinstance(exact.pack(weight), onednn.BlockedWeight)
    assert isinstance(asked.pack(weight), fbgemm_fp16.HalfWeight)
    assert isinstance(asked.pack(weight * 1e5), onednn.BlockedWeight)


AS_WITH_AVX2 = """
from engine.plugins.declaration import read_declaration
from engine.plugins.linear import fbgemm_int8
from engine.plugins.proof.findings import ConformanceError
from engine.plugins.testing.linear import check_linear

declares = read_declaration(fbgemm_int8.__name__)
check_linear(fbgemm_int8.callboard_linear, declares)
fbgemm_int8.INPUT_SCALE, fbgemm_int8.INPUT_ZERO = 1 / 127, 128
try:
    check_linear(fbgemm_int8.callboard_linear, declares)
except ConformanceError as error:
    print(error)
"""


@pytest.mark.slow
@needs_avx2
def test_inputs_of_eight_bits_overflow_where_there_is_only_avx2() -> None:
    # A newer CPU has instructions whose sums do not, which FBGEMM chooses for the whole life of a process.
    environment = os.environ | {"FBGEMM_ENABLE_INSTRUCTIONS": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-c", AS_WITH_AVX2], env=environment, capture_output=True, text=True, check=True
    )
    assert "all elements at the largest: row 0 is off by 0.99 of its size" in done.stdout


@needs_avx2
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_float16_gives_the_same_bits_through_both_doors(rows: int) -> None:
    seed = torch.Generator().manual_seed(1)
    weight, x = torch.randn(48, 32, generator=seed), torch.randn(rows, 32, generator=seed)
    directly, by_schema = (fbgemm_fp16.HalfWeight(weight, one()) for one in (fbgemm_fp16.direct, fbgemm_fp16.by_schema))
    assert torch.equal(directly(x, None), by_schema(x, None))  # bits of one call of FBGEMM, made twice


@needs_avx2
@pytest.mark.parametrize("cut_by", [0, 3])
def test_float16_pads_rows_where_blocks_of_few_give_other_bits(cut_by: int) -> None:
    """Rows are padded where the last ones of a number that is no multiple of six, ``cut_by`` of them, get other bits.

    It relies on FBGEMM, whose blocks of six rows have the same bits wherever they are."""
    pack, product = fbgemm_fp16.direct()

    def with_other_bits(x, packed):
        y = product(x, packed)
        return torch.cat((y[:-cut_by], y[-cut_by:] + 1e-6)) if cut_by and len(x) % 6 else y

    step = fbgemm_fp16.invariant_rows((pack, with_other_bits))
    assert step == 6 if cut_by else step in (1, 6), "FBGEMM chooses by the CPU, whatever torch is set to use"
    weight, x = torch.randn(48, 32, generator=torch.Generator().manual_seed(1)), torch.eye(32)
    padded = fbgemm_fp16.HalfWeight(weight, (pack, with_other_bits), step)
    assert torch.equal(padded(x[:7], None), padded(x, None)[:7])
    assert padded(x[:0], None).shape == (0, 48)


@needs_panels
def test_invariant_numerics_take_a_kernel_by_no_race(caplog: pytest.LogCaptureFixture) -> None:
    context = replace(CPU, checkpoint_dtype="bfloat16", invariant=True)
    with caplog.at_level("INFO"):
        kernel = choose_linear(
            Plugins({"linear": "auto"}), context, lambda kernels: {"panels": 1.0, "onednn": 0.5, "fbgemm_fp16": 0.1}
        )
    assert isinstance(kernel, panels.Panels)
    assert "not by a race" in caplog.text


@needs_avx2
def test_float16_goes_on_without_what_torch_is_to_drop(monkeypatch) -> None:
    monkeypatch.delattr(torch, "fbgemm_linear_fp16_weight_fp32_activation")
    weight = torch.randn(48, 32, generator=torch.Generator().manual_seed(1))
    x = torch.eye(32)
    assert torch.allclose(fbgemm_fp16.Fp16(exact=False).pack(weight)(x, None), weight.T, atol=1e-3, rtol=1e-3)


@needs_avx2
def test_the_scales_of_int8_are_those_of_its_rows() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 3, 8)[:, None]
    x = torch.eye(64)
    error = (fbgemm_int8.FbgemmInt8Weight(weight)(x, None) - weight.T).abs().amax(0) / weight.abs().amax(1)
    assert error.max() < 0.6 / 127


@pytest.mark.parametrize("module", [triton_int8, torch_fp8])
def test_kernels_for_gpus_keep_a_byte_per_element(module) -> None:
    packed = module.callboard_linear(replace(CPU, device="cuda", dtype="bfloat16")).pack(torch.ones(64, 32).bfloat16())
    assert packed.nbytes < 64 * 32 + 64 * 4 + 1


def test_no_kernel_for_gpus_multiplies_by_int8_as_torch_does_without_tensor_cores() -> None:
    for name, module in BUILTIN.items():
        declares = read_declaration(module) if name.startswith("linear.") else None
        if declares is not None and (not declares.devices or "cuda" in declares.devices):
            assert "ops.aten._weight_int8pack_mm" not in Path(find_spec(module).origin).read_text(), name


def test_float8_leaves_odd_sizes_to_torch() -> None:
    assert torch_fp8.Float8().pack(torch.ones(40, 24).bfloat16()) is None


def test_int4_keeps_the_ends_of_each_group_and_leaves_odd_sizes_to_torch() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    packed = torch_int4.Int4().pack(weight)
    assert packed is not None
    kept = packed(torch.eye(64).bfloat16(), None).t().float().unflatten(1, (-1, 32))
    groups = weight.float().unflatten(1, (-1, 32))
    steps = (groups.amax(2) - groups.amin(2)) / 15
    assert ((kept - groups).abs().amax(2) / steps).max() < 0.6
    assert packed.nbytes == 0.625 * weight.numel()
    for shape in ((12, 64), (16, 48)):
        assert torch_int4.Int4().pack(torch.ones(shape).bfloat16()) is None


@pytest.mark.parametrize(("inputs", "tiles"), [(32, 2), (192, 4), (256, 8)])
def test_int4_is_laid_out_for_a_gpu_as_torch_asks(inputs: int, tiles: int) -> None:
    integers = torch.arange(16 * inputs).reshape(16, inputs) % 13
    pairs = torch_int4.pairs(integers.int())
    assert torch.equal(torch.stack((pairs >> 4, pairs & 15), -1).flatten(1), integers)
    assert torch_int4.tiles(inputs) == tiles
    with FakeTensorMode():  # in which torch checks sizes and dtypes, and computes nothing
        packed = torch.ops.aten._convert_weight_to_int4pack(torch.empty(pairs.shape, dtype=pairs.dtype), tiles)
        scales, x = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((inputs // 32, 16, 2), (3, inputs)))
        assert torch.ops.aten._weight_int4pack_mm(x, packed, 32, scales).shape == (3, 16)


def chosen(context: LinearContext, seconds: dict[str, float] | None = None, linear: str = "auto") -> str:
    kernel = choose_linear(Plugins({"linear": linear}), context, lambda kernels: seconds or {})
    return type(kernel).__module__.rpartition(".")[2]


@needs_panels
def test_auto_takes_the_preferred_one_unless_another_is_clearly_faster() -> None:
    assert chosen(CPU) == "panels"
    assert chosen(CPU, {"panels": 1.0, "onednn": 0.75, "torch": 1.0}) == "panels"
    assert chosen(CPU, {"panels": 1.0, "onednn": 0.9, "torch": 0.5}) == "torch"
    bf16 = replace(CPU, checkpoint_dtype="bfloat16")
    assert chosen(bf16, {"panels": 1.0, "onednn": 1.0, "fbgemm_fp16": 0.5, "torch": 0.7}) == "fbgemm_fp16"
    assert chosen(replace(CPU, quantization="int8")) == "panels"
    assert chosen(replace(CPU, quantization="float16")) == "panels"
    assert chosen(replace(CPU, device="cuda", dtype="bfloat16", instruction_sets=())) == "triton_rows"
    assert chosen(replace(CPU, device="cuda", dtype="bfloat16", quantization="fp8")) == "torch_fp8"


@pytest.mark.parametrize(
    ("block", "scales"),
    [
        ((0, 0), "a scale per tensor"),
        ((1, 0), "a scale per output"),
        ((1, 64), "a scale per 64 inputs"),
        ((128, 128), "a scale per block of 128 x 128"),
    ],
)
def test_how_a_rounded_checkpoint_is_multiplied_by_is_said(block: tuple[int, int], scales: str) -> None:
    stored = Quantization(method="fp8", kind="float", bits=8, block=block)
    said = f"stored as fp8 (float8) with {scales}, read as the floats that they stand for"
    assert handling(stored, "none") == f"{said}; model.quantization keeps them small"
    assert handling(stored, "fp8") == f"{said} and rounded to fp8"
    assert handling(stored, "none", kept=True) == f"stored as fp8 (float8) with {scales}, kept so"


def test_a_float8_checkpoint_that_a_gpu_widens_is_named() -> None:
    gpu = replace(CPU, device="cuda", dtype="bfloat16")
    small = Quantization(method="fp8", kind="float", bits=8, block=(128, 128))
    integers = Quantization(method="awq", kind="int", bits=4, block=(1, 128))
    assert widens(small, gpu)
    assert not widens(small, replace(gpu, quantization="fp8"))
    assert not widens(small, CPU)
    assert not widens(integers, gpu), "no kernel keeps them"


@pytest.mark.parametrize(
    ("named", "changes", "kept"),
    [
        ("auto", {}, "fp8"),
        ("auto", {"scale_block": (1, 0)}, "fp8"),
        ("auto", {"scale_block": (0, 0)}, "none"),
        ("auto", {"scale_block": None}, "none"),
        ("auto", {"device": "cpu"}, "none"),
        ("auto", {"dtype": "float16"}, "none"),
        ("auto", {"invariant": True}, "none"),
        ("torch", {}, "none"),
    ],
)
def test_auto_keeps_elements_that_a_kernel_multiplies(named: str, changes: dict[str, Any], kept: str) -> None:
    gpu = LinearContext("cuda", "bfloat16", scale_block=(128, 128))
    assert kept_type(Plugins({"linear": named} if named != "auto" else {}), replace(gpu, **changes)) == kept


def test_a_kernel_that_refuses_to_be_invariant_here_is_checked_without() -> None:
    amx = replace(CPU, dtype="bfloat16", invariant=True, instruction_sets=("avx2", "avx512", "amx"))
    with pytest.raises(PluginError, match="two rows"):
        onednn.callboard_linear(amx)
    assert onednn.callboard_linear(replace(amx, dtype="float32"))

    def never_invariant(context: LinearContext) -> Any:
        if context.invariant:
            raise PluginError("not on this machine")
        return torch_plugin.callboard_linear(context)

    check_linear(never_invariant, Declaration(api=1, dtypes=("float32",), invariant=True))


@needs_panels
def test_what_rounds_more_is_no_candidate_where_nothing_may_be_lost() -> None:
    seen: list[str] = []
    choose_linear(Plugins({"linear": "auto"}), CPU, lambda kernels: seen.extend(kernels) or {})
    assert seen == ["panels", "onednn", "torch"]
    seen.clear()
    traced = replace(CPU, checkpoint_dtype="bfloat16", traced=True)
    choose_linear(Plugins({"linear": "auto"}), traced, lambda kernels: seen.extend(kernels) or {})
    assert seen == ["onednn", "torch"]


@pytest.mark.parametrize(
    ("changes", "linear", "said"),
    [
        (
            {"quantization": "int9"},
            "auto",
            "'int9': no built-in kernel on cpu .* here: 'bfloat16', 'float16', 'int8', 'none'",
        ),
        ({"quantization": "int8", "instruction_sets": ()}, "auto", "supported here: 'none'"),
        ({"quantization": "int8"}, "onednn", "quantization int8, it takes none; can run here: panels, fbgemm_int8"),
        ({"checkpoint_dtype": "float32"}, "fbgemm_fp16", "checkpoint of dtype float32, it takes bfloat16, float16"),
        ({"quantization": "int8", "traced": True}, "fbgemm_int8", "graphs.mode is compiled"),
        (
            {"quantization": "int8", "instruction_sets": ()},
            "fbgemm_int8",
            "a CPU with none of these, it takes one with avx2; no built-in one can run here",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_can(changes: dict, linear: str, said: str) -> None:
    plugins, context = Plugins({"linear": linear}), replace(CPU, **changes)
    for refuse in (lambda: check_linear_fits(plugins, context), lambda: choose_linear(plugins, context, lambda _: {})):
        with pytest.raises(PluginError, match=said):
            refuse()


def test_before_the_device_is_known_only_what_can_never_run_is_refused() -> None:
    config = build_config(Config(), {"model": {"quantization": "int8"}})
    check_linear_fits(Plugins({"linear": "auto"}), linear_context(config))
    check_linear_fits(Plugins({"linear": "fbgemm_int8"}), linear_context(config))
    with pytest.raises(PluginError, match="quantization int8"):
        check_linear_fits(Plugins({"linear": "torch"}), linear_context(config))
    config = build_config(Config(), {"model": {"quantization": "int9"}})
    with pytest.raises(PluginError, match=r"on any device for any dtype .* 'float16', 'fp8', 'int4', 'int8', 'none'"):
        check_linear_fits(Plugins({"linear": "auto"}), linear_context(config))


class Counted:
    element_bytes = 4.0

    def __init__(self) -> None:
        self.num_packed = 0

    def pack(self, weight_OI: torch.Tensor) -> None:
        self.num_packed += 1


def test_kernels_are_measured_once_and_only_for_models_worth_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    race = LinearRace(torch.device("cpu"), torch.float32)
    assert race.seconds({"a": Counted()}, [(64, 64)]) == {}
    kernels = {"a": Counted(), "b": Counted()}
    shapes = [(1024, 1024), (1024, 600)]
    first = race.seconds(kernels, shapes)
    assert set(first) == {"a", "b"}
    assert all(0 < one < 1 for one in first.values())
    assert race.seconds(kernels, shapes) == first
    assert {kernel.num_packed for kernel in kernels.values()} == {2}
    (kept,) = (tmp_path / "callboard" / "measured").iterdir()
    kept.write_text("{")
    race.seconds(kernels, shapes)
    assert {kernel.num_packed for kernel in kernels.values()} == {4}


def test_what_one_kind_of_gpu_is_best_at_is_not_taken_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    race = LinearRace(torch.device("cuda"), torch.bfloat16)
    took = {"H100": {"a": 1.0}, "L40S": {"b": 2.0}}
    for name in ("H100", "L40S"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        monkeypatch.setattr(race, "_measure", lambda kernels, shapes, name=name: took[name])
        assert race.seconds({"a": Counted()}, [(4096, 1024)]) == took[name]


def test_each_layer_is_laid_out_before_the_next_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, seen = Counted(), []
    monkeypatch.setattr(loader, "release_freed", lambda: seen.append(kernel.num_packed))
    spec, cpu = read_model(resolve_checkpoint("demo", "")), torch.device("cpu")
    loader.load_model(spec, LocalComm(), cpu, torch.float32, "safetensors", 0, False, Linears(kernel, kernel))
    layers = [4 * index for index in range(spec.shape.num_layers + 1)]
    assert seen == [0, *layers, layers[-1] + 1]  # the embedding, the layers, the norm; at last with the tied head


class Doubles:
    """Keeps weights in float64, and counts them."""

    element_bytes = 8.0

    def __init__(self) -> None:
        self.num_packed = 0

    def pack(self, weight_OI: torch.Tensor) -> "Doubles.Weight":
        self.num_packed += 1
        return Doubles.Weight(weight_OI.double())

    class Weight:
        def __init__(self, weight_OI: torch.Tensor) -> None:
            self._weight_OI = weight_OI
            self.nbytes = weight_OI.nbytes

        def __call__(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
            y_TO = x_TI.double() @ self._weight_OI.t()
            return (y_TO if bias_O is None else y_TO + bias_O).to(x_TI.dtype)


@pytest.mark.parametrize(
    ("variant", "per_layer"),
    [("gpt2", 4), ("phi3", 4), ("gemma3", 4), ("llama-biases", 4), ("mixtral", 12), ("gpt-oss", 12)],
)
@torch.inference_mode()
def test_every_family_multiplies_by_the_kernel_that_was_chosen(variant: str, per_layer: int, tmp_path: Path) -> None:
    reference = build(variant)
    spec, kernel, head = read_model(save(reference, tmp_path)), Doubles(), Doubles()
    cpu = torch.device("cpu")
    model = loader.load_model(spec, LocalComm(), cpu, torch.float32, "safetensors", 0, False, Linears(kernel, head))
    assert (kernel.num_packed, head.num_packed) == (per_layer * spec.shape.num_layers, 1)
    prompt = [5, 17, 200, 3, 99, 41, 7]
    torch.testing.assert_close(
        Driver(model).step({"a": prompt})["a"], reference_logits(reference, prompt), rtol=1e-4, atol=1e-4
    )


@needs_avx2
def test_libraries_do_what_nothing_was_compiled_for(monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("engine.kernels.panels.compiled", lambda: None)
    with caplog.at_level("INFO"):
        assert chosen(CPU) == "onednn"
    assert "linear.panels is out: linear.panels: its kernels are compiled on this machine, but are not" in caplog.text
    assert chosen(replace(CPU, quantization="int8")) == "fbgemm_int8"
    assert chosen(replace(CPU, quantization="float16")) == "fbgemm_fp16"
    with pytest.raises(PluginError, match="or set plugins"):
        chosen(CPU, linear="panels")


@needs_panels
@pytest.mark.parametrize("kind", PanelKind)
@pytest.mark.parametrize("missing", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_is_seen_in_its_output_alone(kind: PanelKind, missing: float) -> None:
    weight_OI = torch.randn(40, 200)
    weight_OI[7, 130] = missing
    y_TO = panels.PanelWeight(products(), weight_OI, kind)(torch.randn(5, 200), None)
    assert not y_TO[:, 7].isfinite().any()
    y_TO[:, 7] = 0
    assert y_TO.isfinite().all()


@needs_panels
def test_panels_keep_what_they_do_not_round_as_halves_and_round_the_head_least() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))

    def off(kernel: panels.Panels) -> float:
        expected = x.double() @ weight.double().T
        return float((kernel.pack(weight)(x, None) - expected).norm() / expected.norm())

    exact, asked, pairs, bytes_ = (
        panels.callboard_linear(replace(CPU, quantization=one)) for one in ("none", "float16", "bfloat16", "int8")
    )
    assert exact.pack(weight.bfloat16().float()).weight.kind == PanelKind.UPPER_HALVES
    assert exact.pack((weight * 1e-3).half().float()).weight.kind == PanelKind.HALVES
    assert exact.pack(weight).weight.kind == PanelKind.FLOATS
    assert asked.pack(weight).weight.kind == PanelKind.HALVES
    assert asked.pack(weight * 1e5).weight.kind == PanelKind.FLOATS
    halves = PanelKind.PAIRS if products().has_pairs else PanelKind.UPPER_HALVES
    assert pairs.pack(weight).weight.kind == halves
    assert exact.head is exact
    assert off(pairs) < 4e-3
    assert off(pairs.head) < 1e-6
    assert off(bytes_.head) < 0.7 * off(bytes_)
    assert off(exact) < 1e-6


@needs_panels
@pytest.mark.parametrize("kind", PanelKind)
def test_a_row_of_panels_that_is_not_finite_reaches_no_other(kind: PanelKind) -> None:
    kernel = panels.Panels(products(), kind, 1.0).pack(torch.randn(40, 200))
    x = torch.randn(5, 200)
    x[1, 3], x[3, 150] = torch.nan, torch.inf
    assert kernel(x, None).isfinite().all(1).tolist() == [True, False, True, False, True]


@needs_panels
@pytest.mark.parametrize("kind", PanelKind)
def test_two_threads_give_the_bits_of_one(kind: PanelKind) -> None:
    kernel, x = panels.Panels(products(), kind, 1.0).pack(torch.randn(300, 500)), torch.randn(40, 500)
    threads = torch.get_num_threads()
    found = []
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(kernel(x, None))
    torch.set_num_threads(threads)
    assert torch.equal(*found)


@needs_panels
@pytest.mark.parametrize("kind", PanelKind)
def test_many_rows_have_the_bits_of_few(kind: PanelKind) -> None:
    kernel = panels.Panels(products(), kind, 1.0).pack(torch.randn(300, 901))
    x, bias = torch.randn(101, 901), torch.randn(300)
    few = torch.cat([kernel(rows, bias) for rows in x.split(5)])
    threads = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        assert torch.equal(kernel(x, bias), few)
    torch.set_num_threads(threads)


@needs_panels
@pytest.mark.parametrize("kind", PanelKind)
@pytest.mark.parametrize("rows", [1, 5, 101])
def test_panels_without_inputs_give_the_bias(rows: int, kind: PanelKind) -> None:
    kernel, bias = panels.Panels(products(), kind, 1.0).pack(torch.randn(70, 0)), torch.randn(70)
    x = torch.randn(rows, 0)
    assert torch.equal(kernel(x, bias), bias.expand(rows, 70))
    assert torch.equal(kernel(x, None), torch.zeros(rows, 70))


@needs_panels
def test_rounded_weights_serve_and_take_less_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    megabytes = {}
    for quantization in ("none", "int8"):
        config = {"model": {"quantization": quantization}, "plugins": {"linear": "auto"}, "kv": {"num_pages": 64}}
        if quantization == "none":
            config["plugins"] = {"linear": "onednn"}
        caplog.clear()
        with LLM(progress=False, config=config) as llm:
            assert len(llm.generate(["def add(a, b):\n"], greedy)[0].token_ids) == 4
        (line,) = [one for one in caplog.messages if "weights=" in one]
        megabytes[quantization] = float(line.partition("weights=")[2].split()[0])
        expected = "panels for weights in int8" if quantization == "int8" else "onednn for float32 weights"
        assert any(f"plugin: linear.{expected}" in one for one in caplog.messages)
    assert megabytes["int8"] < 0.5 * megabytes["none"]
