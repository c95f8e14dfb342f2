"""A packed weight multiplies like the plain one, whatever the input looks like."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from engine.layers.linear import Linear, VocabLinear
from engine.plugins.comm.local import LocalComm
from engine.plugins.linear import onednn
from engine.plugins.linear.onednn import OneDNN, num_padded_sizes, pack, padded_rows

CPU = torch.device("cpu")
ONEDNN = OneDNN(4)


def filled(bias: bool) -> tuple[Linear, torch.Tensor]:
    linear = Linear(24, 40, bias, CPU, torch.float32)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 24, generator=generator)
    linear.weight.copy_(weight)
    if linear.bias is not None:
        linear.bias.copy_(torch.arange(40.0))
    return linear, weight


@pytest.mark.parametrize("rows", [0, 1, 2, 17, 130])
@pytest.mark.parametrize("bias", [True, False])
def test_packing_does_not_change_the_product(rows: int, bias: bool):
    linear, weight = filled(bias)
    wider = torch.randn(rows, 30, generator=torch.Generator().manual_seed(rows))
    linear.pack(ONEDNN)
    for x in (wider[:, :24].contiguous(), wider[:, :24], wider[:, 6:]):
        expected = F.linear(x, weight, linear.bias)
        torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=1e-5)


def test_plain_weight_is_freed_unless_it_is_read_elsewhere():
    linear, _ = filled(bias=False)
    linear.pack(ONEDNN)
    assert not hasattr(linear, "weight")
    table = VocabLinear(10, 8, LocalComm(), CPU, torch.float32)
    table.weight.copy_(torch.arange(80.0).view(10, 8))
    table.pack(ONEDNN, keep_weight=True)
    assert torch.equal(table.embed(torch.tensor([3, 9])), torch.arange(80.0).view(10, 8)[[3, 9]])
    assert torch.equal(table.logits(torch.eye(8)[:1]), torch.arange(0.0, 80, 8)[None])


def test_what_cannot_be_packed_stays_as_it_is(monkeypatch: pytest.MonkeyPatch):
    assert pack(torch.empty(4, 4, device="meta")) is None
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert pack(torch.zeros(4, 4)) is None
    linear, weight = filled(bias=True)
    linear.pack(ONEDNN)
    x = torch.ones(3, 24)
    assert torch.equal(linear(x), F.linear(x, weight, linear.bias))  # bits of one call of torch, made twice


def test_rows_are_padded_by_a_quarter_at_most_to_few_numbers():
    padded = [padded_rows(rows) for rows in range(1, 4097)]
    assert all(rows <= one <= 1.25 * rows for rows, one in enumerate(padded, 1))
    assert padded[:8] == list(range(1, 9))
    assert sorted(set(padded)) == [padded_rows(one) for one in sorted(set(padded))]
    assert len(set(padded)) == num_padded_sizes(4096) == 44


@pytest.mark.parametrize(("capability", "rows"), [("AVX2", {1, 2, 3, 4}), ("AVX512", {4})])
def test_a_large_weight_is_multiplied_by_four_rows_at_least_with_avx512(
    capability: str, rows: set[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(onednn, "SMALL_BYTES", 0)
    weight = torch.randn(8, 24)
    packed, products = pack(weight), Products()
    assert packed is not None
    for number in (1, 2, 3, 4):
        x = torch.randn(number, 24)
        with products:
            torch.testing.assert_close(packed(x, None), F.linear(x, weight), rtol=1e-5, atol=1e-5)
    assert products.rows == rows


@pytest.mark.parametrize(
    ("capability", "invariant", "laid_out_for"), [("AVX2", False, 1), ("AVX2", True, 64), ("AVX512", False, 64)]
)
def test_a_large_weight_keeps_its_order_with_avx2_alone(
    capability: str, invariant: bool, laid_out_for: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(onednn, "SMALL_BYTES", 0)
    weight, products = torch.randn(8, 24), Products()
    with products:
        pack(weight, invariant)
        monkeypatch.setattr(onednn, "SMALL_BYTES", weight.nbytes)
        pack(weight, invariant)
    assert products.laid_out_for == [laid_out_for, 64]


class Products(TorchDispatchMode):
    """How many rows oneDNN is asked for: it keeps what it compiles for each.  laid_out_for: rows, of each weight."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: set[int] = set()
        self.laid_out_for: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.mkldnn._linear_pointwise.default:
            self.rows.add(args[0].shape[0])
        if func is torch.ops.mkldnn._reorder_linear_weight.default:
            self.laid_out_for.append(args[1])
        return func(*args, **(kwargs or {}))


def test_a_product_is_compiled_for_few_numbers_of_rows():
    linear, weight = filled(bias=True)
    linear.pack(ONEDNN)
    products = Products()
    x = torch.randn(600, 24, generator=torch.Generator().manual_seed(0))
    for rows in range(1, 601):
        with products:
            y = linear(x[:rows])
        if rows % 37 == 0:
            torch.testing.assert_close(y, F.linear(x[:rows], weight, linear.bias), rtol=1e-5, atol=1e-5)
    assert 20 < len(products.rows) <= num_padded_sizes(600) == 33
