"""The kernels of a small model on a CPU, next to what they replace."""

import hashlib
import logging
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from callboard import LLM, SamplingParams
from engine.kernels import sources
from engine.kernels.attention import CompiledAttention
from engine.kernels.compiled import compiled
from engine.kernels.cpu import CPUKernels, cpu_kernels
from engine.kernels.library import KernelLibrary
from engine.kernels.panels import products
from engine.layers.mlp import gated
from engine.layers.norm import HeadNorm, RMSNorm
from engine.layers.rotary import Rotary
from engine.settings.own_kernels import VARIABLE, c_compiler, kernels_here
from engine.types.errors import PluginError

CPU = torch.device("cpu")
EPS = 1e-6
FEW = ("team.c", "cpu.c", "draw.c")  # what ``CPUKernels`` calls; all sources take a minute
QUICK = ("-O1", *sources.FLAGS[1:])

pytestmark = pytest.mark.skipif(not c_compiler(), reason="there is no C compiler")


@pytest.fixture
def anew(monkeypatch, tmp_path):
    """A cache folder without a library, a process that has loaded none, and a compiler that is soon done."""
    monkeypatch.setattr(sources, "FLAGS", QUICK)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled.cache_clear()
    yield
    compiled.cache_clear()


@pytest.fixture
def few(anew, monkeypatch):
    """As ``anew``, for two of the sources: how a library is made and kept does not depend on what else is in it."""
    monkeypatch.setattr(sources, "SOURCES", {name: sources.SOURCES[name] for name in FEW})


@pytest.fixture
def kernels() -> CPUKernels:
    found = cpu_kernels()
    assert found is not None
    return found


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 256), (5, 37), (3, 1), (0, 8)])
def test_the_sum_and_its_norm(kernels, num_tokens, size):
    norm = RMSNorm(size, EPS, CPU, torch.float32)
    norm.weight.normal_()
    x_TD, update_TD = torch.randn((2, num_tokens, size))
    expected_TD, sum_TD = norm.added(x_TD.clone(), update_TD, None), x_TD + update_TD
    found_TD = kernels.add_norm(x_TD, update_TD, norm.weight, EPS)
    torch.testing.assert_close(found_TD, expected_TD)
    torch.testing.assert_close(x_TD, sum_TD, rtol=0, atol=0)


def test_a_row_that_is_not_finite_reaches_no_other(kernels):
    x_TD, update_TD = torch.randn((2, 4, 64))
    x_TD[1, 3], x_TD[2, 5] = torch.nan, torch.inf
    found_TD = kernels.add_norm(x_TD, update_TD, torch.ones(64), EPS)
    assert found_TD[1:3].isfinite().all(-1).tolist() == [False, False]
    assert found_TD[[0, 3]].isfinite().all()


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("num_tokens", "scale"), [(1, 1.0), (6, 0.5)])
def test_heads_are_normed_turned_and_stored(kernels, normed, num_tokens, scale):
    num_queries, num_keys, size, num_slots = 4, 2, 64, 32
    rotary = Rotary(torch.rand(size // 2), scale, torch.float32)
    norm = HeadNorm(num_queries, num_keys, size, EPS, CPU, torch.float32)
    norm.weight.normal_()
    qkv_TAH = torch.randn((num_tokens, num_queries + 2 * num_keys, size))
    positions_T = torch.randint(2000, (num_tokens,))
    slots_T = torch.randperm(num_slots)[:num_tokens]
    keys_SGH, values_SGH = torch.zeros((2, num_slots, num_keys, size))

    rotated = num_queries + num_keys
    turned = qkv_TAH[:, :rotated]
    expected_TAH = rotary.rotate(norm(turned) if normed else turned, rotary.angles(positions_T))
    expected_keys, expected_values = keys_SGH.clone(), values_SGH.clone()
    expected_keys[slots_T], expected_values[slots_T] = expected_TAH[:, num_queries:], qkv_TAH[:, rotated:]

    (angles_TH,) = rotary.angles(positions_T, kernels)
    weight = norm.weight if normed else None
    q_TQH = kernels.rotate_and_store(qkv_TAH, weight, EPS, angles_TH, keys_SGH, values_SGH, slots_T)
    torch.testing.assert_close(q_TQH, expected_TAH[:, :num_queries])
    torch.testing.assert_close(keys_SGH, expected_keys)
    torch.testing.assert_close(values_SGH, expected_values, rtol=0, atol=0)


def test_a_slot_below_zero_stores_nothing_and_one_beyond_the_pool_is_refused(kernels):
    keys_SGH, values_SGH = torch.zeros((2, 8, 1, 4))
    qkv_TAH, angles_TH = torch.ones((2, 3, 4)), torch.ones((2, 4))
    kernels.rotate_and_store(qkv_TAH, None, 0.0, angles_TH, keys_SGH, values_SGH, torch.tensor([-1, 7]))
    assert values_SGH.sum((1, 2)).tolist() == [0.0] * 7 + [4.0]
    assert keys_SGH[:7].eq(0).all()
    with pytest.raises(IndexError, match="slot 8 of token 1"):
        kernels.rotate_and_store(qkv_TAH, None, 0.0, angles_TH, keys_SGH, values_SGH, torch.tensor([0, 8]))


@pytest.mark.parametrize(("num_tokens", "width"), [(1, 432), (5, 37), (3, 1), (0, 8), (90, 432)])
def test_the_gate_of_a_mlp(kernels, num_tokens, width):
    gate_up_T2I = torch.randn((num_tokens, 2 * width)) * 8
    torch.testing.assert_close(kernels.gated(gate_up_T2I), gated(gate_up_T2I, "silu", None))
    expected = gated(gate_up_T2I.double(), "gelu", None).float()
    torch.testing.assert_close(kernels.gated(gate_up_T2I, "gelu"), expected, atol=1e-4, rtol=1e-5)


def test_gates_at_the_ends_of_float32(kernels):
    gates = torch.tensor([[-1e38, -200.0, -88.5, 88.5, 200.0, 1e38, torch.nan, torch.inf, 0.0]])
    found = kernels.gated(torch.cat((gates, torch.ones_like(gates)), 1))
    torch.testing.assert_close(found[:, 1:], F.silu(gates)[:, 1:], equal_nan=True)
    assert found[0, 0].abs() < 2  # the sigmoid is cut above the least normal number


def test_a_row_has_the_same_bits_among_any_others_and_with_two_threads(kernels, monkeypatch):
    num_tokens, size, width = 200, 96, 432
    x_TD, update_TD, gate_up_T2I = (*torch.randn((2, num_tokens, size)).unbind(), torch.randn((num_tokens, 2 * width)))
    heads_TAH, angles_TH = torch.randn((num_tokens, 6, 64)), torch.randn((num_tokens, 64))
    weight_D, weight_RH = torch.randn(size), torch.randn((4, 64))

    def results(first: int, last: int) -> list[torch.Tensor]:
        keys_SGH, values_SGH = torch.zeros((2, num_tokens, 2, 64))
        part, slots_T = slice(first, last), torch.arange(last - first)
        return [
            kernels.add_norm(x_TD[part].clone(), update_TD[part], weight_D, EPS),
            kernels.gated(gate_up_T2I[part]),
            kernels.rotate_and_store(
                heads_TAH[part].clone(), weight_RH, EPS, angles_TH[part].clone(), keys_SGH, values_SGH, slots_T
            ),
            keys_SGH[: last - first],
        ]

    together = results(0, num_tokens)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for first, last in [(0, num_tokens), *((at, at + 1) for at in range(9)), (9, 12), (12, 111)]:
        for found, expected in zip(results(first, last), together, strict=True):
            assert torch.equal(found, expected[first:last])


@pytest.mark.slow
def test_a_model_writes_the_same_with_and_without(monkeypatch, anew):
    calls, rows = [], []
    stored, attended = CPUKernels.rotate_and_store, CompiledAttention.attend

    def counted(*arguments):
        calls.append(arguments)
        return stored(*arguments)

    def counted_too(*arguments):
        rows.append(arguments)
        return attended(*arguments)

    def written() -> list[str]:
        config = {"device": {"threads": 1}, "plugins": {"linear": "onednn"}}  # whose decode steps go layer by layer
        with LLM("examples/demo_model", config=config) as llm:
            prompts = ["What is a page?", "def f(", "import sys\n" * 20]
            return [one.text for one in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))]

    monkeypatch.setattr(CPUKernels, "rotate_and_store", counted)
    monkeypatch.setattr(CompiledAttention, "attend", counted_too)
    with_kernels = written()
    assert len(calls) >= 24 * 5
    assert len(rows) >= 23 * 5
    calls.clear()
    rows.clear()
    monkeypatch.setenv(VARIABLE, "torch")
    compiled.cache_clear()
    assert written() == with_kernels
    assert not calls
    assert not rows


@pytest.mark.slow
def test_the_second_start_compiles_nothing(monkeypatch, few, kernels):
    def compiles(*arguments, **options):
        raise AssertionError("compiled again")

    compiled.cache_clear()
    monkeypatch.setattr(subprocess, "run", compiles)
    assert cpu_kernels() is not None


@pytest.mark.slow
def test_where_nothing_can_be_kept_it_is_compiled_at_each_start(monkeypatch, few, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / f"callboard-{os.getuid()}").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = cpu_kernels()
    assert found is not None
    assert found.add_norm(torch.ones(1, 4), torch.ones(1, 4), torch.ones(4), 0.0).tolist() == [[1.0] * 4]


@pytest.fixture
def kept(few, tmp_path):
    """The file that a first start has left."""
    assert cpu_kernels() is not None
    compiled.cache_clear()
    (path,) = (tmp_path / "callboard" / "kernels").iterdir()
    return path


@pytest.mark.slow
@pytest.mark.parametrize("home", ["has it and cannot be written", "is none"])
def test_the_second_start_compiles_nothing_without_a_home_either(monkeypatch, kept, tmp_path, home):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if home == "is none":
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        assert cpu_kernels() is not None
        compiled.cache_clear()
        (path,) = (tmp_path / f"callboard-{os.getuid()}" / "kernels").iterdir()
        assert path.read_bytes()[1:4] == b"ELF"
    else:
        monkeypatch.setattr("engine.kernels.library.writable_folder", lambda _: None)
    monkeypatch.setattr("engine.kernels.sources.made", lambda *_: pytest.fail("compiled again"))
    assert cpu_kernels() is not None


@pytest.mark.slow
def test_a_kept_file_that_cannot_be_loaded_is_made_again(kept):
    kind, _, _ = kept.name.partition("-")
    foreign = b"of another machine"
    kept.unlink()
    other = kept.with_name(f"{kind}-{hashlib.sha256(foreign).hexdigest()[:32]}.so")
    other.write_bytes(foreign)
    assert cpu_kernels() is not None
    (own,) = set(kept.parent.iterdir()) - {other}
    assert own.read_bytes()[1:4] == b"ELF"


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut short", "zeros in the middle"])
def test_a_damaged_kept_file_is_made_again(kept, damage):
    """Code that is loaded and is not what was compiled ends the process, so this runs in another one."""
    content = bytearray(kept.read_bytes())
    third = len(content) // 3
    kept.write_bytes(content[:5000] if damage == "cut short" else content[:third] + bytes(third) + content[2 * third :])
    few = f"sources.FLAGS, sources.SOURCES = {QUICK}, {{name: sources.SOURCES[name] for name in {FEW}}}"
    start = "from engine.kernels.cpu import cpu_kernels; from torch import ones; found = cpu_kernels()"
    use = "print(found.add_norm(ones(1, 4), ones(1, 4), ones(4), 0.0).tolist())"
    done = subprocess.run(
        [sys.executable, "-c", f"from engine.kernels import sources; {few}; {start}; {use}"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "[[1.0, 1.0, 1.0, 1.0]]\n"), done.stderr
    assert f"{kept} is damaged" in done.stderr
    (made,) = kept.parent.iterdir()
    assert hashlib.sha256(made.read_bytes()).hexdigest()[:32] in made.name


@pytest.mark.slow
def test_the_compiler_may_have_arguments_and_a_command_before_it(monkeypatch, few, tmp_path):
    called = tmp_path / "called"
    before = tmp_path / "before"
    before.write_text(f'#!/bin/sh\necho "$1 $2" >> {called}\nexec "$@"\n')
    before.chmod(0o755)
    monkeypatch.setenv("CC", f"'{before}' cc -DOWN=1")
    assert cpu_kernels() is not None
    assert kernels_here() == "own"
    assert set(called.read_text().splitlines()) == {"cc -DOWN=1"}


@pytest.mark.slow
def test_a_compiler_without_openmp_makes_functions_of_one_thread(monkeypatch, few, tmp_path):
    compiler = tmp_path / "plain-cc"
    compiler.write_text('#!/bin/sh\ncase " $* " in *" -fopenmp "*) exit 1;; esac\nexec cc "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    found = cpu_kernels()
    assert found is not None
    assert found.add_norm(torch.ones(1, 4), torch.ones(1, 4), torch.ones(4), 0.0).tolist() == [[1.0] * 4]


@pytest.mark.slow
def test_a_cpu_without_vectors_for_products_has_all_else(monkeypatch, anew):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert products() is None
    with LLM("examples/demo_model", config={"device": {"threads": 1}}) as llm:
        (written,) = llm.generate(["def f("], SamplingParams(temperature=0, max_tokens=8))
    assert len(written.token_ids) == 8
    assert compiled() is not None


def test_torch_does_the_work_where_there_is_no_compiler_and_where_it_fails(monkeypatch, anew, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("CC", "no-such-compiler")
    assert cpu_kernels() is None
    assert "CC='no-such-compiler' names no program here" in caplog.text
    monkeypatch.setenv("CC", "'no end")
    compiled.cache_clear()
    assert cpu_kernels() is None
    assert 'CC="\'no end" names no program' in caplog.text
    compiled.cache_clear()
    with monkeypatch.context() as empty:
        empty.delenv("CC")
        empty.setenv("PATH", "/nowhere")
        assert cpu_kernels() is None
    assert "there is no C compiler" in caplog.text
    compiled.cache_clear()
    monkeypatch.setenv("CC", "false")
    compiled.cache_clear()
    assert cpu_kernels() is None
    assert "cannot compile team.c, cpu.c, attention.c, products.c, decodes.c, draw.c" in caplog.text
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setenv(VARIABLE, "torch")
    compiled.cache_clear()
    assert cpu_kernels() is None


def test_recurrences_that_cannot_be_compiled_are_left_to_torch(kernels, monkeypatch, caplog):
    def fails(self, source):
        raise PluginError(f"{source} cannot be compiled")

    monkeypatch.setattr(KernelLibrary, "functions_of", fails)
    assert CPUKernels(kernels._library).recurrences is None
    assert "computed by torch: recurrent.c cannot be compiled" in caplog.text
