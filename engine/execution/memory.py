"""What a rank's memory goes to: the KV pool gets what weights, the largest step and graphs leave.

Legend: T tokens of the largest step · B its sequences · N rows that are sampled
Owns: running that step on a pool of one page, the arithmetic, the report.  Does not know: how graphs are measured.
"""

import logging
from dataclasses import dataclass

import numpy as np
import torch

from engine.config import Config
from engine.errors import ConfigError
from engine.kv.pool import KVPool
from engine.layers.attention import AttentionBackend, AttentionBatch
from engine.layers.step import StepTensors
from engine.models.decoder import Decoder
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampler

log = logging.getLogger(__name__)

POOL_SEQUENCES = 4  # a pool beyond this many full batches buys nothing until prefixes are shared
# What takes the most memory of all that is sampled without a line of token counts.
SAMPLED = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, logprobs=1)


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that must stay free beside the pool.

    activation_bytes: of the largest step.  graph_bytes: of all graphs."""

    activation_bytes: int = 0
    graph_bytes: int = 0

    def __str__(self) -> str:
        return f"{_gigabytes(self.activation_bytes)} for a step, {_gigabytes(self.graph_bytes)} for graphs"


def pool_pages(config: Config, max_len: int, page_bytes: int, free_bytes: int, needs: Needs) -> int:
    """Pages for the free memory.  Raises ConfigError if not even one sequence of full length fits."""
    page_size, fraction = config.kv.page_size, config.kv.memory_fraction
    per_sequence = -(-max_len // page_size)
    fitting = max(0, int(free_bytes * fraction) - needs.activation_bytes - needs.graph_bytes) // page_bytes
    if fitting < per_sequence:
        reserved = f" after {needs}" if needs != Needs() else ""
        lower = ", or scheduler.max_step_tokens or graphs.max_tokens" if needs != Needs() else ""
        raise ConfigError(
            f"kv.memory_fraction={fraction}: leaves room for {fitting} pages of {page_size} tokens{reserved}, "
            f"one sequence of {max_len} tokens needs {per_sequence}; raise it, lower model.max_len{lower}, or set "
            "kv.num_pages"
        )
    return min(fitting, per_sequence * config.scheduler.max_running * POOL_SEQUENCES)


@torch.inference_mode()
def run_largest_step(
    config: Config, max_len: int, model: Decoder, pool: KVPool, attention: AttentionBackend, sampler: Sampler
) -> None:
    """A step of scheduler.max_step_tokens, whose sequences are as long as can be: it takes more memory than any other.

    pool: of any size; everything is read from and written to the dump page.  Rows of ``sampler`` must be free.
    """
    scheduler, device = config.scheduler, pool.data.device
    num_tokens, chunk = scheduler.max_step_tokens, min(scheduler.prefill_chunk, max_len)
    full, rest = divmod(min(num_tokens, chunk * scheduler.max_running), chunk)
    queries = np.array([chunk] * full + [rest] * bool(rest), dtype=np.int32)
    num_tokens = int(queries.sum())
    lengths = np.full(len(queries), max_len, dtype=np.int32)
    starts = np.concatenate(([0], queries.cumsum())).astype(np.int32)
    width = -(-max_len // pool.page_size)
    attention.begin(
        AttentionBatch(
            num_decodes=0,
            page_table_BP=torch.full((len(queries), width), pool.dump_page, dtype=torch.int32, device=device),
            lengths_B=torch.from_numpy(lengths).to(device),
            query_starts_B1=torch.from_numpy(starts).to(device),
            host_lengths=lengths,
            host_query_lengths=queries,
        )
    )
    rows_N = np.arange(min(scheduler.max_running, num_tokens))
    for row in rows_N.tolist():
        sampler.admit(row, SAMPLED, np.zeros(1, dtype=np.int32), 1, ())
    zeros_T = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    logits_NV = model.forward(
        StepTensors(
            token_ids_T=zeros_T,
            positions_T=zeros_T,
            slots_T=zeros_T + pool.dump_page * pool.page_size,
            sample_at_N=torch.from_numpy(rows_N).to(device),
            attention=attention,
            pool=pool,
        )
    )
    sampler.sample(logits_NV, rows_N, np.ones(len(rows_N), dtype=np.int64))


def report(rank: int, model: Decoder, pool: KVPool, needs: Needs, graph_bytes: int, left_bytes: int) -> None:
    """Say once, at start, where the memory went.  needs: as estimated.  graph_bytes: as it came to be."""
    log.info(
        "rank %d memory: weights %s, activations %s, graphs %s (expected %s), KV pool %s (%d pages, %d tokens), "
        "left %s",
        rank,
        _gigabytes(model.parameter_bytes),
        _gigabytes(needs.activation_bytes),
        _gigabytes(graph_bytes),
        _gigabytes(needs.graph_bytes),
        _gigabytes(pool.data.nbytes),
        pool.num_pages,
        pool.num_pages * pool.page_size,
        _gigabytes(left_bytes),
    )


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
