"""The proof of recurrent parts: what computes each token alone passes, and what does not is found."""

import pytest
import torch

from engine.checkpoints.shape import GatedDeltaShape, LightningShape, Mamba2Shape, RecurrentShape, ShortConvolutionShape
from engine.layers.part import Recurrent, RowwisePart, build
from engine.plugins.comm.local import LocalComm
from engine.plugins.proof.states import require_same_states

CPU, WIDTH = torch.device("cpu"), 48
SHAPES: dict[str, RecurrentShape] = {
    "convolution": ShortConvolutionShape(size=WIDTH, taps=3),
    "delta rule": GatedDeltaShape(num_heads=4, num_keys=2, key_size=16, value_size=12, taps=4, eps=1e-6),
    "lightning": LightningShape(num_heads=4, head_size=12, rates=(0.5, 0.2, 0.1, 1e-5), eps=1e-6),
    "Mamba 2": Mamba2Shape(num_heads=4, num_groups=2, head_size=16, state_size=12, taps=4, eps=1e-6),
}


def new_part(shape: RecurrentShape) -> Recurrent:
    part = build(Recurrent, shape, WIDTH, LocalComm(), CPU, torch.float32)
    torch.manual_seed(1)
    for one in part.slices("x"):
        one.target.normal_(0, 0.3)
    part.pack(None)
    return part


class Alone:
    """A product of one row at a time: torch's own depends on the number of rows."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self.nbytes = 0

    def __call__(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        return torch.stack([(self._weight * x_I).sum(1) for x_I in x_TI])


@pytest.mark.parametrize("kind", SHAPES)
def test_a_part_that_computes_tokens_alone_passes(kind: str) -> None:
    part = new_part(SHAPES[kind])
    for linear in part.linears:
        linear.packed = Alone(linear.weight)
    assert isinstance(part, RowwisePart)
    part.by_rows()
    require_same_states(part, SHAPES[kind], WIDTH, CPU, torch.float32)


@pytest.mark.parametrize("kind", ["delta rule", "Mamba 2"])
def test_a_part_with_chunks_is_found(kind: str) -> None:
    part = new_part(SHAPES[kind])
    for linear in part.linears:
        linear.packed = Alone(linear.weight)
    with pytest.raises(AssertionError, match="have other bits in steps of"):
        require_same_states(part, SHAPES[kind], WIDTH, CPU, torch.float32)
