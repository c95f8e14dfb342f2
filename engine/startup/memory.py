"""The memory of a rank: the KV pool gets what weights, the largest step and graphs leave.

Owns: how large that step is, its estimate for a CPU, the arithmetic, the refusals, the report.
Does not know: how a step is run, how graphs are measured.
"""

import logging

import numpy as np
import torch

from engine.checkpoints.checkpoint import ModelSpec
from engine.checkpoints.shape import DecoderShape
from engine.config import Config
from engine.execution.needs import Needs, gigabytes
from engine.execution.prompt_logprobs import SCORED_ROWS
from engine.kernels.attention import attends_in_c
from engine.layers.kv_pool import KVPool
from engine.models.model import Model
from engine.plugins.linear.onednn import COMPILED_BYTES, num_padded_sizes
from engine.sampling.state import PART_SCORES_CPU
from engine.startup.model_steps import ModelSteps
from engine.types.errors import ConfigError
from engine.types.params import SamplingParams

log = logging.getLogger(__name__)

MAX_CPU_POOL_BYTES = 4 << 30  # other programs use this memory too
MAX_HOST_SHARE = 0.9  # of the available host memory: page-locked memory cannot be swapped, and other programs need some
# A process that tokenizes or serves HTTP, and this one's own growth: connections, texts, the tree of prefixes.
PROCESS_BYTES = 64 << 20
# Per token of the vocabulary and row of the part that is sampled: memory of top_p (``engine/sampling/cuts.py``).
SAMPLING_BYTES = 40
# The same per row or position of a prompt whose log probabilities are wanted, which are not divided into parts: with
# 151,936 tokens 16 to 256 rows take 14 to 12 bytes, including the part.
SCORING_BYTES = 12
# If scores are capped or have sinks, a block of queries has its scores in memory, and copies of them.
SCORED_QUERIES = 128
LEAST_CONTEXT = 1024  # tokens; with less a model is of little use, and an error says what to change
POOL_SEQUENCES = 4  # a pool beyond this many full batches is of no use until prefixes are shared
# The parameters that take the most memory to sample, without counts of tokens.
SAMPLED = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, logprobs=1)


def pool_pages(config: Config, max_len: int, page_bytes: int, free_bytes: int, needs: Needs) -> int:
    """Return the pages for the free memory.  If a sequence of full length does not fit, the pool bounds the context,
    with a warning.  Raises ConfigError for a length that was set, and if less than LEAST_CONTEXT tokens fit."""
    page_size, fraction = config.kv.page_size, config.kv.memory_fraction
    per_sequence = -(-max_len // page_size)
    fitting = max(0, int(free_bytes * fraction) - needs.total) // page_bytes
    if per_sequence > fitting >= -(-LEAST_CONTEXT // page_size) and not config.model.max_model_len:
        log.warning(
            "the context is lowered to %d tokens from the model's %d: no more fit %s of memory%s; "
            "a smaller kv.dtype holds more",
            fitting * page_size,
            max_len,
            gigabytes(free_bytes),
            f" after {needs}" if needs != Needs() else "",
        )
        return fitting
    if fitting < per_sequence:
        reserved = f" after {needs}" if needs != Needs() else ""
        levers = ["model.max_model_len"]
        if needs.activation_bytes:
            levers += ["scheduler.max_running", "scheduler.max_step_tokens"]
        if needs.graph_bytes:
            levers.append("graphs.max_tokens")
        raise ConfigError(
            f"kv.memory_fraction={fraction}: of {gigabytes(free_bytes)} it leaves room for {fitting} pages of "
            f"{page_size} tokens{reserved}, one sequence of {max_len} tokens needs {per_sequence}; raise it, lower "
            f"{' or '.join(levers)}, or set kv.num_pages"
        )
    return min(fitting, per_sequence * config.scheduler.max_running * POOL_SEQUENCES)


def require_room(asked: str, num_pages: int, page_bytes: int, available: int, share: float, needs: Needs) -> None:
    """Raise ConfigError if pages need more than ``share`` of the available memory without ``needs``.
    asked: the setting and its bytes."""
    fitting = int(max(0, available - needs.total) * share) // page_bytes
    if num_pages > fitting:
        reserved = f" after {needs}" if needs != Needs() else ""
        raise ConfigError(
            f"{asked} asked for, {available / 1e9:.1f} GB are available, of which {share:.0%} may be used{reserved}; "
            f"lower it to {fitting} or less"
        )


def most_sampled(config: Config, num_tokens: int, more_samples: int) -> int:
    """Return the most positions of a step of ``num_tokens`` that are sampled.

    more_samples: positions of one row that are sampled in a step, in addition to its last one."""
    return min(config.scheduler.max_running * (1 + more_samples), num_tokens)


def host_needs(config: Config, shape: DecoderShape, max_len: int, dtype: torch.dtype, more_samples: int = 0) -> Needs:
    """Estimate the needs on a CPU, where the largest step cannot be tried: beyond its limit a process is killed.

    The estimate adds up, for one rank, what a step can hold at once: all that a layer computes of T tokens, half of it
    again for padded copies, a mask of T queries against the longest context and a copy of that context's keys and
    values, unless ``attention.torch`` attends in C, the sampler's and prompt log probabilities' work on the
    vocabulary, and the host's tables.
    more_samples: as in ``most_sampled``."""
    scheduler, ranks = config.scheduler, config.device.tensor_parallel
    num_tokens = min(scheduler.max_step_tokens, max_len * scheduler.max_running)
    num_sampled = most_sampled(config, num_tokens, more_samples)
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size
    layer = 4 * shape.hidden_size + (4 * heads + 4 * shape.intermediate_size) // ranks + 2 * shape.input_width
    context = 4 * max_len * shape.num_kv_heads * shape.head_size  # a power of two that holds it, keys and values
    if config.kv.kept_as(str(dtype).removeprefix("torch.")):
        context += context // 2  # a copy as pages store it
    masks = num_tokens * max_len * (2 if shape.window else 1)
    if shape.attention_needs:
        masks += 3 * shape.num_heads // ranks * SCORED_QUERIES * max_len
    if attends_in_c(shape.attention_needs, dtype) and not config.kv.kept_as(str(dtype).removeprefix("torch.")):
        context = masks = 0  # C reads pages in place, and needs no mask
    in_dtype = (num_tokens * layer * 3 // 2 + context + masks) * dtype.itemsize
    part = min(num_sampled * shape.num_outputs, max(shape.num_outputs, PART_SCORES_CPU))
    scored = (num_sampled + min(num_tokens, SCORED_ROWS)) * shape.num_outputs
    tables = scheduler.max_running * max_len * 8
    weight_shapes = 5  # QKV, attention output, gate and up, down, LM head
    others = config.placement.tokenizers + (config.placement.ingress == "process")
    return Needs(
        activation_bytes=in_dtype + part * SAMPLING_BYTES + scored * SCORING_BYTES + tables,
        product_bytes=weight_shapes * num_padded_sizes(num_tokens) * COMPILED_BYTES,
        process_bytes=(1 + others) * PROCESS_BYTES,
    )


def run_largest_step(config: Config, max_len: int, steps: ModelSteps, more_samples: int = 0) -> None:
    """Run a step of scheduler.max_step_tokens with the longest sequences: it takes more memory than any other, but for
    a model with recurrent layers, for which a step of all rows follows.
    more_samples: as in ``most_sampled``."""
    scheduler = config.scheduler
    full, rest = divmod(min(scheduler.max_step_tokens, max_len * scheduler.max_running), max_len)
    queries = np.array([max_len] * full + [rest] * bool(rest), dtype=np.int32)
    lengths = np.full(len(queries), max_len, dtype=np.int32)
    num_sampled = most_sampled(config, int(queries.sum()), more_samples)
    steps.run(lengths, queries, num_sampled, SAMPLED, num_rows=scheduler.max_running)
    if steps.has_states:  # each row's are copied
        most = scheduler.max_running
        steps.run(np.full(most, 2, dtype=np.int32), np.ones(most, dtype=np.int32), most, SAMPLED)


def check_weights(spec: ModelSpec, needed_bytes: int, dtype: torch.dtype, available: int, ranks: int) -> None:
    """Raise ConfigError, before anything is loaded, if a rank's weights cannot fit: a CPU's system would kill the
    process without a message.  needed_bytes, available: those of one of ``ranks``."""
    if needed_bytes <= available:
        return
    name = str(dtype).removeprefix("torch.")
    share = "" if ranks == 1 else f" for each of {ranks} ranks"
    halved = ", set model.dtype = 'bfloat16'" if dtype == torch.float32 else ""
    raise ConfigError(
        f"model.path={spec.directory}: its weights need {gigabytes(needed_bytes)} in {name}{share}, "
        f"{gigabytes(available)} are available; free some, raise the container's limit{halved}, or choose a "
        "smaller model"
    )


def check_states(num_rows: int, state_bytes: int, available: int) -> None:
    """Raise ConfigError if the states of recurrent layers cannot fit.  state_bytes: of one row.

    A row has one more state, for the prefix cache."""
    if (needed := 2 * num_rows * state_bytes) > available:
        raise ConfigError(
            f"scheduler.max_running={num_rows}: the states of recurrent layers need {gigabytes(needed)}, "
            f"{state_bytes / 1e6:.1f} MB twice for each running request, and {gigabytes(available)} are available; "
            f"set it to {available // (4 * state_bytes)} or less, which leaves room for keys and values"
        )


def report(rank: int, model: Model, pool: KVPool, needs: Needs, graph_bytes: int, left_bytes: int) -> None:
    """Log once, at start, where the memory went.  needs: the estimate.  graph_bytes: the memory that graphs took."""
    log.info(
        "rank %d memory: weights %s, activations %s, graphs %s (expected %s), compiled products %s, processes %s, "
        "KV pool %s (%d pages, %d tokens), left %s",
        rank,
        gigabytes(model.weight_bytes),
        gigabytes(needs.activation_bytes),
        gigabytes(graph_bytes),
        gigabytes(needs.graph_bytes),
        gigabytes(needs.product_bytes),
        gigabytes(needs.process_bytes),
        gigabytes(pool.data.nbytes),
        pool.num_pages,
        pool.num_pages * pool.page_size,
        gigabytes(left_bytes),
    )
