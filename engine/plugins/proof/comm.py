"""The checks of one rank of a communication library: every collective, compared with local sums.

Owns: the inputs of every rank, the comparison.  Does not know: how ranks are connected.
"""

import torch
from torch import Tensor

from engine.layers.comm import Comm, ExchangingComm
from engine.plugins.proof.findings import Findings

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 8), (5, 7), (3, 2, 4), (33, 1024))
# A sum may be rounded to its type once per rank.
RELATIVE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def check_rank(comm: Comm, device: str = "cpu") -> list[Tensor]:
    """Check everything one rank does; all ranks of the group must call this at once.

    Every rank goes through all of it whatever it finds, so that none waits for one that has given up.
    Returns what every rank must have got alike, to the bit.  Raises ConformanceError, at the end.
    """
    findings = Findings(f"rank {comm.rank} of {comm.size}")
    alike: list[Tensor] = []
    for dtype in DTYPES:
        for shape in SHAPES:
            name = f"{str(dtype).removeprefix('torch.')} {'x'.join(map(str, shape))}"
            for strided in (False, True):
                what = f"{name}{', not contiguous' if strided else ''}"
                with findings.case(f"all_reduce {what}"):
                    alike.append(_check_all_reduce(comm, shape, dtype, strided, device))
                for dim in range(-1, len(shape)):
                    with findings.case(f"all_gather {what}, dim {dim}"):
                        alike.append(_check_all_gather(comm, shape, dtype, strided, dim, device))
    with findings.case("all_gather of int64"):
        alike.append(_check_all_gather(comm, (4, 3), torch.int64, False, 0, device))
    if isinstance(comm, ExchangingComm):
        for kind in (*DTYPES, torch.int64):
            with findings.case(f"all_to_all of {str(kind).removeprefix('torch.')}"):
                _check_all_to_all(comm, kind, device)
    with findings.case("close twice"):
        comm.close()
        comm.close()
    findings.conclude()
    return alike


def rank_input(rank: int, shape: tuple[int, ...], dtype: torch.dtype, strided: bool, device: str) -> Tensor:
    """Return a rank's input: each rank can make those of the others, so that nothing is exchanged to compare."""
    generator = torch.Generator().manual_seed(1000 * rank + len(shape))
    # The slice is taken on the device, as a copy to another device is dense.
    wide = torch.randn((*shape[:-1], 2 * shape[-1]), generator=generator).mul(8).to(device, dtype)
    made = wide[..., ::2] if strided else wide[..., : shape[-1]].contiguous()
    assert made.is_contiguous() != strided, "the check's own input has the wrong strides"
    return made


def _check_all_reduce(comm: Comm, shape: tuple[int, ...], dtype: torch.dtype, strided: bool, device: str) -> Tensor:
    inputs = [rank_input(rank, shape, dtype, strided, device) for rank in range(comm.size)]
    exact = torch.stack([one.double() for one in inputs])
    own = inputs[comm.rank]
    result = comm.all_reduce(own)
    assert result is own, "all_reduce must sum in place and return the tensor it was given"
    error = (own.double() - exact.sum(0)).abs()
    allowed = exact.abs().sum(0) * RELATIVE[dtype] * comm.size
    assert (error <= allowed).all(), f"the sum is off by up to {error.max():.3g}"
    return own


def _check_all_gather(
    comm: Comm, shape: tuple[int, ...], dtype: torch.dtype, strided: bool, dim: int, device: str
) -> Tensor:
    inputs = [rank_input(rank, shape, dtype, strided, device) for rank in range(comm.size)]
    own = inputs[comm.rank]
    before = own.clone()
    gathered = comm.all_gather(own, dim)
    expected = torch.cat(inputs, dim)
    assert gathered.shape == expected.shape, f"its shape is {tuple(gathered.shape)}, not {tuple(expected.shape)}"
    assert gathered.dtype == dtype, f"its type is {gathered.dtype}"
    assert torch.equal(gathered, expected), "it is not every rank's part in rank order"
    assert torch.equal(own, before), "it changed its input"
    return gathered


def _check_all_to_all(comm: ExchangingComm, dtype: torch.dtype, device: str) -> None:
    """Exchange rows of which each pair of ranks has another number; some have none."""

    def number(sender: int, receiver: int) -> int:
        return (2 * sender + receiver) % 4

    def rows(sender: int) -> list[Tensor]:
        made = rank_input(sender, (16 * comm.size, 8), torch.float32, False, device).to(dtype)
        counts = [number(sender, one) for one in range(comm.size)]
        return list(torch.split(made[: sum(counts)], counts))

    own = torch.cat(rows(comm.rank))
    before = own.clone()
    sent = [number(comm.rank, one) for one in range(comm.size)]
    received = [number(one, comm.rank) for one in range(comm.size)]
    exchanged = comm.all_to_all(own, sent, received)
    expected = torch.cat([rows(one)[comm.rank] for one in range(comm.size)])
    assert exchanged.shape == expected.shape, f"its shape is {tuple(exchanged.shape)}, not {tuple(expected.shape)}"
    assert exchanged.dtype == dtype, f"its type is {exchanged.dtype}"
    assert torch.equal(exchanged, expected), "it is not every rank's rows for this one, in rank order"
    assert torch.equal(own, before), "it changed its input"
    nothing = comm.all_to_all(own[:0], [0] * comm.size, [0] * comm.size)
    assert nothing.shape == (0, 8), f"an exchange of nothing has the shape {tuple(nothing.shape)}"
