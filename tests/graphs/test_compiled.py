"""The split trace: where it is cut, what is compiled once, and that compiled pieces give the eager model's logits."""

import operator
import os

import pytest
import torch
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from engine.errors import GraphError
from engine.graphs.compiled import (
    CACHE_VARIABLE,
    AllReducePart,
    AttendPart,
    NamedPart,
    Piece,
    keep_compilations,
)
from engine.graphs.device import HostDevice
from engine.graphs.splitting import ATTEND, fingerprint, split
from engine.models.decoder import DecoderLayer
from engine.plugins.testing.steps import Driver
from tests.graphs.driver import PiecewiseDriver
from tests.models.checkpoints import random_tokens
from tests.models.conftest import Cases


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


def parts_of(driver):
    return list(driver.compiled._stitched.children())


def compare(driver, counts, tolerance):
    plain = Driver(driver.plain, page_size=4, num_pages=100)
    for count in counts:
        batch = {f"s{count}": random_tokens(count, count)}
        got, expected = (one.step(batch)[f"s{count}"] for one in (driver, plain))
        assert got.shape == expected.shape
        assert (got - expected).abs().max() <= tolerance * expected.abs().max()


def test_compilations_are_kept_where_the_next_start_finds_them(monkeypatch):
    for found, kept in ((None, "/home/of/cache/callboard/inductor"), ("/tmp/mine", "/tmp/mine")):
        monkeypatch.setenv("XDG_CACHE_HOME", "/home/of/cache")
        monkeypatch.setenv(CACHE_VARIABLE, found or default_cache_dir())
        keep_compilations()
        assert os.environ[CACHE_VARIABLE] == kept


def test_attention_stands_alone_between_pieces(direct):
    driver = direct()
    driver.step({"a": random_tokens(5, 1)})
    assert [type(part) for part in parts_of(driver)] == [Piece, AttendPart] * 3 + [Piece]
    assert [part._layer for part in parts_of(driver)[1::2]] == [0, 1, 2]


def test_layers_share_a_compilation_and_no_step_compiles_again(direct):
    driver = direct(fixed_shapes=False)
    for count in (5, 2, 9, 16):
        driver.step({f"s{count}": random_tokens(count, 1)})
    assert driver.compiled.num_compilations == 3  # the first piece, the two in the middle, the last
    driver = direct(fixed_shapes=True)
    for count in (5, 2, 5):
        driver.step({f"s{count}": random_tokens(count, 1)})
    assert driver.compiled.num_compilations == 3 * 2


def test_two_models_do_not_share_a_trace(cases: Cases, direct):
    first = direct()
    for variant in ("qwen3", "llama", "qwen3-tied"):
        other = PiecewiseDriver(cases[variant].model, device=HostDevice(), compiler="eager")
        compare(other, [5], 0)
    compare(first, [5, 6], 0)


def test_a_single_token_runs_without_the_trace(direct):
    driver = direct()
    driver.step({"a": random_tokens(1, 1)})
    assert driver.compiled._stitched is None


def test_capturing_where_nothing_captures_compiles_ahead(direct):
    driver = direct(fixed_shapes=False)
    driver.piecewise.capture()
    assert driver.compiled.num_compilations == 3
    compare(driver, [7], 0)


@pytest.mark.parametrize("device", [HostDevice, None])
def test_operations_that_plugins_name_are_split_at(cases: Cases, monkeypatch, device):
    finish = DecoderLayer.finish

    def scaled(self, x, attended, kernels):
        half, quarter = torch.ops.callboard_test.halves(finish(self, x, attended, kernels))
        return half + quarter

    monkeypatch.setattr(DecoderLayer, "finish", scaled)
    driver = PiecewiseDriver(
        cases["qwen3-tied"].model, compiler="eager", named=["callboard_test::halves"], device=device and device()
    )
    driver.piecewise.capture()
    compare(driver, [5, 12, 16], 0)
    kinds = [type(part) for part in parts_of(driver)]
    assert kinds == [Piece, AttendPart, Piece, NamedPart] * 3 + [Piece]
    assert AllReducePart not in kinds


def test_a_model_without_its_attention_calls_is_refused(direct, monkeypatch):
    driver = direct()
    monkeypatch.setattr(driver.plain, "layers", driver.plain.layers * 2)
    monkeypatch.setattr(type(driver.plain), "hidden", lambda self, step: self.embedding.embed(step.token_ids_T))
    with pytest.raises(GraphError, match="0 attention calls to split at, the model 6 layers"):
        driver.step({"a": random_tokens(5, 1)})


def test_a_model_that_cannot_be_traced_says_what_to_do(direct, monkeypatch):
    finish = DecoderLayer.finish
    monkeypatch.setattr(DecoderLayer, "finish", lambda *args: finish(*args) if args[1].sum() > 0 else args[1])
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what a compiler says of itself
def test_inductor_pieces_give_the_eager_logits(direct, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    driver = direct(compiler="inductor", fixed_shapes=False)
    compare(driver, [2, 3, 4, 5, 7, 8, 9, 16, 17], 1e-5)
    assert driver.compiled.num_compilations == 3
    driver = direct(compiler="inductor", fixed_shapes=True)
    compare(driver, [8], 1e-5)
