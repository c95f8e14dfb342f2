"""The sum over ranks in the launch of a norm, by ranks that are streams of one GPU: the same bits on all, and the time.

Programs of all ranks must be on the GPU at once, so tokens are few.  Between GPUs a counter takes longer; what is
timed here is the kernel, and what is checked its order of memory.
"""

from collections.abc import Iterator, Sequence

import torch

from engine.kernels.choice import choose_kernels
from gpu_sections.kernels import no_kernels
from gpu_sections.rows import REPLAYS, Row, skipped

EPS = 1e-6
USES = 50  # of the memory, so that both halves of a slot are written again


def section(
    device: torch.device,
    sizes: Sequence[tuple[int, int, int]] = ((2, 1, 4096), (2, 16, 4096), (8, 1, 8192), (8, 4, 8192)),
) -> Iterator[Row]:
    """A row per size.  sizes: (ranks, tokens, width)."""
    if choose_kernels(device) is None:
        yield from no_kernels(device)
        return
    if device.type != "cuda":
        yield skipped("ranks of one process run one after the other in the interpreter")
        return
    from engine.kernels.norm import add_norm
    from engine.kernels.summed_norm import COUNTER_BYTES, SLOTS, RanksMemory, memory_bytes, sum_add_norm

    for size, num_tokens, width in sizes:
        memory = [torch.zeros(memory_bytes(size), dtype=torch.uint8, device=device) for _ in range(size)]
        addresses = torch.tensor([one.data_ptr() for one in memory], dtype=torch.int64, device=device)
        uses = torch.zeros((size, SLOTS), dtype=torch.int64, device=device)
        ranks = [RanksMemory(rank, addresses, uses[rank]) for rank in range(size)]
        streams = [torch.cuda.Stream(device) for _ in range(size)]
        parts = torch.randn((size, num_tokens, width), device=device).bfloat16()
        weight = torch.randn(width, device=device).bfloat16()
        # A kernel is loaded while no other runs: with counters that have long risen, a rank waits for none.
        for rank in ranks:
            ahead = [one.clone() for one in memory]
            for one in ahead:
                one[: SLOTS * size * COUNTER_BYTES].view(torch.int64).fill_(1 << 40)
            theirs = torch.tensor([one.data_ptr() for one in ahead], dtype=torch.int64, device=device)
            alone = RanksMemory(rank.rank, theirs, torch.zeros(SLOTS, dtype=torch.int64, device=device))
            sum_add_norm(alone, torch.zeros_like(parts[0]), parts[rank.rank], weight, EPS)
            torch.cuda.synchronize()
        graphs, outs = [], []
        for rank, stream in zip(ranks, streams, strict=True):
            x_TD = torch.zeros((num_tokens, width), device=device, dtype=torch.bfloat16)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                x_TD.zero_()
                for _ in range(USES):
                    y_TD = sum_add_norm(rank, x_TD, parts[rank.rank], weight, EPS)
            graphs.append(graph)
            outs.append((x_TD, y_TD))
        times = []
        for _ in range(REPLAYS):
            torch.cuda.synchronize()
            starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in ranks] for _ in range(2))
            for graph, stream, start, end in zip(graphs, streams, starts, ends, strict=True):
                with torch.cuda.stream(stream):
                    start.record()
                    graph.replay()
                    end.record()
            torch.cuda.synchronize()
            # From the last to begin: the ranks before it wait for it.
            times.append(starts[-1].elapsed_time(ends[-1]) * 1e3 / USES)
        total = torch.zeros((num_tokens, width), device=device)
        for part in parts:
            total += part.float()
        x_TD = torch.zeros((num_tokens, width), device=device, dtype=torch.bfloat16)
        for _ in range(USES):
            y_TD = add_norm(x_TD, total.bfloat16(), weight, EPS)
        differing = sum(
            int((found != expected).sum()) for pair in outs for found, expected in zip(pair, (x_TD, y_TD), strict=True)
        )
        case = f"{size} ranks, {num_tokens} tokens of {width}, {USES} sums and norms a replay"
        yield {"case": case, "ok": differing == 0, "error": differing, "us": sorted(times)[len(times) // 2]}
