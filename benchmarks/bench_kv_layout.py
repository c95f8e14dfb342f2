"""How long do pages take to the host tier and back, layer-first and page-first?

The pool is that of a 28-layer model with 8 KV heads of 128 in bfloat16, on a GPU if there is one.  Pages are random
ones, or lie side by side; both layouts take turns, and the ratio is of their medians.

    python benchmarks/bench_kv_layout.py                  # half a minute, 1 GB of memory
    python benchmarks/bench_kv_layout.py --pages 8 --output FILE
"""

import time
from typing import Any, get_args

import numpy as np
import torch
from machine import keep, new_parser
from rich.console import Console
from rich.table import Table

from engine.features.host_tier.copy_stream import copies_on
from engine.features.host_tier.landings import Landings
from engine.features.host_tier.messages import Transfers
from engine.features.host_tier.pool import HostPool
from engine.layers.kv_pool import KVPool, Layout
from engine.messages import Step

NUM_LAYERS, NUM_KV_HEADS, HEAD_SIZE = 28, 8, 128


def transfer(to_host: bool, device_pages: np.ndarray, host_pages: np.ndarray) -> Step:
    """A step that does nothing else."""
    columns = (np.full(len(host_pages), to_host), device_pages, host_pages)
    direction, on_device, on_host = (np.asarray(column, dtype=np.int32).tobytes() for column in columns)
    return Transfers(to_host=direction, device_pages=on_device, host_pages=on_host)


def measure(page_size: int, num_pages: int, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Milliseconds of every layout, direction and choice of pages."""
    pools = {}
    for layout in get_args(Layout):
        pool = KVPool(
            NUM_LAYERS, 2 * num_pages, page_size, NUM_KV_HEADS, HEAD_SIZE, torch.bfloat16, device, layout=layout
        )
        pool.data.fill_(1.0)
        pools[layout] = HostPool(num_pages, pool, Landings(copies_on(device)))
    rng = np.random.default_rng(0)
    on_host = np.arange(num_pages)
    rows = []
    for choice in ("random", "side by side"):
        for to_host in (True, False):
            times: dict[str, list[float]] = {layout: [] for layout in pools}
            for _ in range(rounds + 1):
                pages = rng.permutation(2 * num_pages)[:num_pages] if choice == "random" else on_host
                step = transfer(to_host, pages, on_host)
                for layout, host in pools.items():
                    begin = time.perf_counter()
                    host.apply(step)
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
                    times[layout].append(1e3 * (time.perf_counter() - begin))
            medians = {layout: float(np.median(seen[1:])) for layout, seen in times.items()}  # memory is there by then
            rows.append({"pages": choice, "way": "to the host" if to_host else "back", **medians})
    return rows


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--page-size", type=int, default=16, help="tokens (default: 16)")
    parser.add_argument("--pages", type=int, default=100, help="moved at a time (default: 100)")
    parser.add_argument("--rounds", type=int, default=15, help="of each case (default: 15)")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = measure(arguments.page_size, arguments.pages, arguments.rounds, device)
    page_bytes = KVPool.page_bytes(NUM_LAYERS, arguments.page_size, NUM_KV_HEADS, HEAD_SIZE, torch.bfloat16)
    table = Table(title=f"{arguments.pages} pages of {page_bytes / 1e6:.2f} MB on {device.type}")
    for column in ("pages", "way", "layer-first", "page-first", "layer / page"):
        table.add_column(column, justify="left" if column in ("pages", "way") else "right")
    for row in rows:
        layer, page = row["layer_first"], row["page_first"]
        table.add_row(row["pages"], row["way"], f"{layer:.1f} ms", f"{page:.1f} ms", f"{layer / page:.2f}x")
    Console().print(table)
    keep(arguments.output, {"page_bytes": page_bytes, "pages": arguments.pages, "rows": rows})


if __name__ == "__main__":
    main()
