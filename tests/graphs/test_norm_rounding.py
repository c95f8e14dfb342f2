"""The pass that makes residual add, norm and rounding one operation: same numbers, no copy, and when it holds back."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import lookup_backend
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule, symbolic_trace

from engine.graphs.compiled import OUR_PASSES
from engine.graphs.device import HostDevice
from engine.graphs.norm_rounding import round_behind_norms
from engine.graphs.passes import PassManager
from engine.graphs.splitting import operation_name
from engine.kernels.float8_ops import ADD_NORM_ROUND, ROUND
from engine.layers.packing import Linears
from engine.models import loader
from engine.plugins.comm.local import LocalComm
from engine.plugins.families import read_model
from engine.plugins.linear.torch import Plain
from engine.plugins.linear.torch_fp8 import Float8
from engine.plugins.testing.steps import Driver
from tests.graphs.driver import PiecewiseDriver
from tests.models.checkpoints import build, random_tokens, save

EPS = 1e-6
Piece = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def round_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    return torch.ops.callboard.round_rows(x, group)


def layer(x: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """As the decoder's: the residual stream goes on behind the norm."""
    rounded = round_rows(torch.rms_norm(x.add_(update), (256,), weight, EPS), 0)
    return rounded[0], rounded[1], x * 2


def in_groups(x: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    rounded = round_rows(F.rms_norm(x.add_(update), (256,), weight, EPS), 128)
    return rounded[0][:5], rounded[1][:5], x * 2


def norm_is_read(x: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """As by a router of experts."""
    normed = torch.rms_norm(x.add_(update), (256,), weight, EPS)
    return round_rows(normed, 0)[0], normed * 2


def sum_is_read(x: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    total = x.add_(update)
    return round_rows(torch.rms_norm(total, (256,), weight, EPS), 0)[0], total * 2


def written_in_between(x: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    total = x.add_(update)
    x.mul_(2)
    return round_rows(torch.rms_norm(total, (256,), weight, EPS), 0)


def nothing_is_added(x: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return round_rows(torch.rms_norm(x, (256,), weight, EPS), 0)


def a_number_is_added(x: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return round_rows(torch.rms_norm(x.add_(1.0), (256,), weight, EPS), 0)


def no_weight(x: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return round_rows(torch.rms_norm(x.add_(update), (256,), None, EPS), 0)


def several_dimensions(x: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    total = torch.rms_norm(x.add_(update), (5, 256), weight.expand(5, -1), EPS)
    return round_rows(total, 0)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, update = (torch.randn(5, 256, generator=generator).bfloat16() for _ in range(2))
    return x, update, torch.randn(256, generator=generator).bfloat16()


def operations(piece: GraphModule) -> list[str]:
    return [name for node in piece.graph.nodes if (name := operation_name(node)).startswith("callboard::")]


def passed(function: Piece) -> GraphModule:
    piece = symbolic_trace(function)
    PassManager([("ours", round_behind_norms)]).run(piece)
    return piece


def compare(function: Piece, piece: GraphModule) -> None:
    """The bits are those of the same calls of torch, since ``callboard.add_norm_round`` makes them on a CPU."""
    ours, theirs = inputs(), inputs()
    for found, expected in zip((*piece(*ours), *ours), (*function(*theirs), *theirs), strict=True):
        assert torch.equal(found.float(), expected.float())


@pytest.mark.parametrize("function", [layer, in_groups])
def test_three_operations_become_one_with_the_same_numbers(function: Piece) -> None:
    piece = passed(function)
    assert operations(piece) == [ADD_NORM_ROUND]
    assert not piece.graph.find_nodes(op="call_method", target="add_")
    compare(function, piece)


@pytest.mark.parametrize(
    "function",
    [
        norm_is_read,
        sum_is_read,
        written_in_between,
        nothing_is_added,
        a_number_is_added,
        no_weight,
        several_dimensions,
    ],
)
def test_what_is_no_such_run_is_left_alone(function: Piece) -> None:
    piece = passed(function)
    assert operations(piece) == [ROUND]
    compare(function, piece)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what a compiler says of itself
def test_the_compiler_lets_it_write_the_residual_stream_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def run(x: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return round_rows(torch.rms_norm(x.add_(update), (256,), weight, EPS), 0)

    def compiled_once() -> tuple[Tensor, Tensor, Tensor]:
        given = inputs()
        with torch.inference_mode():
            lookup_backend("inductor")(passed(run), list(given))(*given)
        return given

    given, (code,) = run_and_get_code(compiled_once)
    assert code.count("callboard.add_norm_round.default(arg0_1") == 1
    assert "copy_" not in code
    x, update, _ = inputs()
    assert torch.equal(given[0], x + update)


@pytest.mark.slow
def test_a_model_in_float8_is_traced_and_keeps_its_numbers(tmp_path: Path) -> None:
    spec = read_model(save(build("qwen3-tied"), tmp_path))
    linears = Linears(Float8(), Plain(2))
    cpu = torch.device("cpu")
    model = loader.load_model(spec, LocalComm(), cpu, torch.bfloat16, "safetensors", 0, False, linears)
    seen: list[list[str]] = []
    passes = [*OUR_PASSES, ("to look", lambda piece: seen.append(operations(piece)))]
    driver = PiecewiseDriver(model, device=HostDevice(), compiler="eager", passes=passes)
    batch = {"a": random_tokens(5, 1)}
    with torch.inference_mode():
        found, expected = (one.step(batch)["a"] for one in (driver, Driver(driver.plain, page_size=4, num_pages=100)))
    assert torch.equal(found, expected)  # bits of the same calls of torch, made twice
    # The first piece has a norm that nothing is added before; the last one ends with the residual stream.
    outputs = [ROUND, ADD_NORM_ROUND, ROUND]
    assert seen == [[ROUND], [*outputs, ADD_NORM_ROUND], outputs]
