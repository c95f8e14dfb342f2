"""The split trace: where it is cut, what is compiled once, and that compiled pieces give the eager model's logits."""

import operator
import os
import shutil
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir
from torch._inductor.utils import run_and_get_code

from engine.graphs.compiled import (
    CACHE_VARIABLE,
    AllReducePart,
    AttendPart,
    NamedPart,
    Piece,
    keep_compilations,
)
from engine.graphs.device import HostDevice
from engine.graphs.splitting import ATTEND, fingerprint, operation_name, split
from engine.models.decoder import DecoderLayer
from engine.plugins.testing.steps import Driver
from engine.types.errors import GraphError
from tests.graphs.driver import SIZES, PiecewiseDriver
from tests.models.checkpoints import random_tokens
from tests.models.conftest import Cases

pytestmark = pytest.mark.slow


@torch.library.custom_op("callboard_test::halves", mutates_args=())
def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two results, of which a trace takes one after the other."""
    return x * 0.5, x * 0.25


@halves.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@pytest.fixture
def direct(cases: Cases):
    """Builds a driver whose pieces are compiled and run directly."""

    def build(**options):
        return PiecewiseDriver(cases["qwen3-tied"].model, device=HostDevice(), **{"compiler": "eager", **options})

    return build


def compare(driver, counts, tolerance):
    plain = Driver(driver.plain, page_size=4, num_pages=100)
    for count in counts:
        batch = {f"s{count}": random_tokens(count, count)}
        got, expected = (one.step(batch)[f"s{count}"] for one in (driver, plain))
        assert got.shape == expected.shape
        assert (got - expected).abs().max() <= tolerance * expected.abs().max()


def test_compilations_are_kept_where_the_next_start_finds_them(monkeypatch, tmp_path):
    for found, kept in ((None, f"{tmp_path}/callboard/inductor"), ("/tmp/mine", "/tmp/mine")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv(CACHE_VARIABLE, found or default_cache_dir())
        keep_compilations()
        assert os.environ[CACHE_VARIABLE] == kept


def test_without_a_home_compilations_are_kept_where_they_can_be_written(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    keep_compilations()
    assert cache_dir() == f"{tmp_path}/callboard-{os.getuid()}/inductor"  # which torch has made


def test_attention_stands_alone_between_pieces(direct):
    driver = direct()
    driver.step({"a": random_tokens(5, 1)})
    parts = driver.compiled.parts
    assert [type(part) for part in parts] == [Piece, AttendPart] * 3 + [Piece]
    assert [part.layer for part in parts[1::2]] == [0, 1, 2]


def test_layers_share_a_compilation_and_no_step_compiles_again(direct):
    driver = direct()
    for count in (5, 2, 9, 16):
        driver.step({f"s{count}": random_tokens(count, 1)})
    assert driver.compiled.num_compilations == 3  # the first piece, the two in the middle, the last


def test_a_step_past_the_largest_size_runs_the_compiled_pieces(cases: Cases, monkeypatch):
    driver = PiecewiseDriver(cases["qwen3-tied"].model, compiler="eager")
    driver.piecewise.capture()
    known = driver.compiled.num_compilations
    plain = Driver(driver.plain, page_size=4, num_pages=100)
    batch = {"long": random_tokens(SIZES[-1] + 3, 1)}
    expected = plain.step(batch)["long"]
    monkeypatch.setattr(type(driver.plain), "forward", lambda *_: pytest.fail("the model itself was run"))
    assert torch.equal(driver.step(batch)["long"], expected)  # bits of the same calls of torch, made twice
    assert driver.compiled.num_compilations == known == 3


def test_passes_are_given_each_piece_once_and_keep_its_results(direct):
    seen = []

    def add_twice_half(piece):
        seen.append(piece)
        for node in piece.graph.find_nodes(op="call_method", target="add_"):
            with piece.graph.inserting_before(node):
                halves_of = piece.graph.call_function(torch.ops.callboard_test.halves.default, (node.args[1],))
                half = piece.graph.call_function(operator.getitem, (halves_of, 0))
                added = piece.graph.call_method("add_", (node.args[0], half))
            node.args = (added, half)

    driver = direct(passes=[("graph_pass.halves", add_twice_half)])
    compare(driver, [5, 16], 1e-5)
    called = [sum(operation_name(node) == "callboard_test::halves" for node in piece.graph.nodes) for piece in seen]
    assert called == [0, 2, 2]  # a layer adds twice


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda piece: 1 / 0, "ZeroDivisionError"),
        (lambda piece: piece.graph.erase_node(piece.graph.find_nodes(op="output")[0]), "."),
        (lambda piece: piece.graph.placeholder("more"), "what the piece takes or returns"),
    ],
)
def test_a_pass_that_fails_or_breaks_a_piece_is_named(direct, change, said):
    driver = direct(passes=[("graph_pass.theirs", change)])
    with pytest.raises(GraphError, match=rf"graph pass graph_pass.theirs failed \(.*{said}.*plugins.graph_passes"):
        driver.step({"a": random_tokens(5, 1)})


def test_operations_that_a_model_does_not_have_are_told(direct, caplog):
    driver = direct(named=["callboard_test::halves"])
    driver.step({"a": random_tokens(5, 1)})
    assert "graphs: the model never calls callboard_test::halves, so it is not split there" in caplog.messages


def test_two_models_do_not_share_a_trace(cases: Cases, direct):
    first = direct()
    for variant in ("qwen3", "llama", "qwen3-tied"):
        other = PiecewiseDriver(cases[variant].model, device=HostDevice(), compiler="eager")
        compare(other, [5], 0)
    compare(first, [5, 6], 0)


def test_a_single_token_runs_without_the_trace(direct):
    driver = direct()
    driver.step({"a": random_tokens(1, 1)})
    assert driver.compiled.parts == ()


def test_capturing_where_nothing_captures_compiles_ahead(direct):
    driver = direct()
    driver.piecewise.capture()
    assert driver.compiled.num_compilations == 3
    compare(driver, [7], 0)


@pytest.mark.parametrize("device", [HostDevice, None])
def test_operations_that_plugins_name_are_split_at(cases: Cases, monkeypatch, device):
    finish = DecoderLayer.finish

    def scaled(self, x, normed, attended, kernels):
        half, quarter = torch.ops.callboard_test.halves(finish(self, x, normed, attended, kernels))
        return half + quarter

    monkeypatch.setattr(DecoderLayer, "finish", scaled)
    driver = PiecewiseDriver(
        cases["qwen3-tied"].model, compiler="eager", named=["callboard_test::halves"], device=device and device()
    )
    driver.piecewise.capture()
    compare(driver, [5, 12, 16], 0)
    kinds = [type(part) for part in driver.compiled.parts]
    assert kinds == [Piece, AttendPart, Piece, NamedPart] * 3 + [Piece]
    assert AllReducePart not in kinds


def test_a_model_without_its_attention_calls_is_refused(direct, monkeypatch):
    driver = direct()
    monkeypatch.setattr(type(driver.plain), "hidden", lambda self, step: self.embedding.embed(step.token_ids_T))
    with pytest.raises(GraphError, match="0 attention calls to split at, the model 3 layers"):
        driver.step({"a": random_tokens(5, 1)})


@pytest.mark.parametrize(
    "goes_on",
    [lambda x_TD: x_TD.sum() > 0, lambda x_TD: any(x_TD.argmax(-1).bincount(minlength=2).tolist())],
    ids=["a branch", "counts of experts"],
)
def test_a_model_that_cannot_be_traced_says_what_to_do(direct, monkeypatch, goes_on):
    finish = DecoderLayer.finish
    monkeypatch.setattr(DecoderLayer, "finish", lambda *args: finish(*args) if goes_on(args[1]) else args[1])
    with pytest.raises(GraphError, match=r"graphs.mode=compiled: the model cannot be compiled .*graphs.mode=off"):
        direct().step({"a": random_tokens(5, 1)})


def test_pieces_are_equal_only_if_they_do_the_same():
    def trace(scale, width):
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        x.meta["example_value"] = torch.empty(2, width)
        graph.output((graph.call_function(torch.mul, (x, scale)),))
        return torch.fx.GraphModule(torch.nn.Module(), graph)

    assert fingerprint(trace(2, 3)) == fingerprint(trace(2, 3))
    assert fingerprint(trace(2, 3)) != fingerprint(trace(4, 3))
    assert fingerprint(trace(2, 3)) != fingerprint(trace(2, 4))


def test_several_results_of_a_split_operation_stay_with_it():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    both = graph.call_function(torch.ops.callboard_test.halves.default, (graph.call_function(torch.neg, (x,)),))
    halved, quartered = (graph.call_function(operator.getitem, (both, place)) for place in range(2))
    graph.output((graph.call_function(torch.add, (halved, quartered)),))
    stitched, parts = split(torch.fx.GraphModule(torch.nn.Module(), graph), {"callboard_test::halves", ATTEND})
    assert [part.operation for part in parts] == [None, "callboard_test::halves", None]
    assert stitched(torch.ones(2))[0].tolist() == [-0.75, -0.75]


@torch.library.custom_op("callboard_test::add_into", mutates_args=("total",))
def add_into(total: Tensor, part: Tensor) -> None:
    """A fused kernel that updates the residual stream does this."""
    total.add_(part)


@add_into.register_fake
def _(total: Tensor, part: Tensor) -> None:
    return None


def residual_by_kernel(piece):
    """A pass that puts in an operation that writes in place."""
    for node in piece.graph.find_nodes(op="call_method", target="add_"):
        with piece.graph.inserting_before(node):
            piece.graph.call_function(torch.ops.callboard_test.add_into.default, node.args)
        node.replace_all_uses_with(node.args[0])
        piece.graph.erase_node(node)


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor finds no C++ compiler")
@pytest.mark.filterwarnings("ignore")  # what a compiler says of itself
def test_inductor_pieces_give_the_eager_logits(cases: Cases, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = cases["qwen3-tied"].model
    monkeypatch.setattr(model, "layers", model.layers[:1])
    monkeypatch.setattr(model, "attention_spec", replace(model.attention_spec, num_layers=1))
    passes = [("graph_pass.residual", residual_by_kernel)]
    driver = PiecewiseDriver(model, device=HostDevice(), compiler="inductor", passes=passes)
    _, code = run_and_get_code(compare, driver, [2, 3, 5, 7, 16, 17], 1e-5)
    assert driver.compiled.num_compilations == 2
    # The compiler makes a piece functional, and takes that back without a copy of the residual stream.
    assert sum(one.count("callboard_test.add_into.default(arg") for one in code) == 2
