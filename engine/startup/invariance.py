"""Proof that a rank gives a token the same bits whatever else is in a step, on this machine and with these weights.

Legend: T rows of a step · D model dim · Q query heads · H head size · V vocabulary
Owns: which parts are tried, with how many rows at a time.  Does not know: kernels, why a part would differ.

Every part is run on random rows, once on all of them together and once on pieces of every size that it meets.  A part
that is not exactly equal is named, and the start ends: no engine serves with numerics that do not hold.  A captured
step repeats what is proved here; a step that is another program, a call of C, has a proof of its own.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.execution.attention import RankAttention
from engine.execution.captured_steps import CapturedDecodes
from engine.execution.prompt_logprobs import SCORED_ROWS
from engine.execution.rows import DeviceRows
from engine.layers.attention import AttentionBackend, AttentionSpec
from engine.layers.comm import Comm
from engine.layers.gated_attention import GatedAttention
from engine.layers.kv_pool import KVPool, Layout
from engine.layers.part import Attention, Norm
from engine.layers.recurrent import RecurrentPart
from engine.layers.states import RecurrentStates, StatesOfStep
from engine.layers.step import StepTensors
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.hybrid_layer import HybridLayer
from engine.models.model import Model
from engine.plugins.proof.invariance import layers_needed, pages_needed, require_same_bits
from engine.plugins.proof.states import require_same_states
from engine.plugins.support.paging import batch_on, new_pool
from engine.sampling.captured import SamplingVariant
from engine.sampling.logprobs import batch_logprobs
from engine.sampling.sampler import Sampler
from engine.sampling.state import Newcomer
from engine.types.errors import ConfigError
from engine.types.params import SamplingParams

log = logging.getLogger(__name__)

# Rows first:last -> their results, as the part computes them when it gets only these.
Rows = Callable[[int, int], Tensor]
SEED = 5
WITH_STATES = 8  # rows that are tried: states of all rows may take a quarter of the memory
# Parameters of the rows, in turn.  One row also has a penalty; only one, because counts of tokens take memory.
WISHES = (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=20, top_p=0.9))
PENALISED_ROW, PENALISED = 3, SamplingParams(repetition_penalty=1.1)


def require_provable(plan: Model, device: torch.device) -> None:
    """Raise ConfigError for a model with a part that is known to differ there, or that is not tried.  plan: its
    shapes."""
    if not isinstance(plan, Decoder) or plan.task_head is not None:
        fault = "only callboard's own families that generate text, with the same heads in all layers, support it"
    elif plan.attention_spec.latent_size:
        fault = "this model's pages keep latents, for which there is no proof"
    elif device.type != "cpu" and plan.shape.experts:
        fault = "this model has experts, and a GPU's kernel of experts takes tiles by the number of a step's tokens"
    else:
        return
    raise ConfigError(f"model.numerics=invariant: {fault}; set model.numerics=fast")


@torch.inference_mode()
def prove_invariance(
    model: Decoder,
    attention: RankAttention,
    comm: Comm,
    sampler: Sampler,
    *,
    device: torch.device,
    page_size: int,
    layout: Layout,
    kv_dtype: str,
    max_tokens: int,
    max_rows: int,
) -> None:
    """Raise ConfigError that names the parts that differ.  All ranks call it together, with their final threads.

    sampler: a sampler of max_rows, unused; its rows are changed.  max_tokens: most rows of a step."""
    start = time.perf_counter()
    spec = model.attention_spec
    num_pages = max(pages_needed(page_size), -(-max_tokens // page_size))
    few_layers = replace(spec, num_layers=layers_needed(spec))
    pool = new_pool(few_layers, num_pages, page_size, model.dtype, device, layout, kv_dtype)
    backend = attention.build(pool)
    differing = [_attention_difference(backend, spec, pool)]
    differing += _recurrence_differences(model, comm.size)
    for name, num_rows, part in _parts(model, backend, pool, sampler, max_tokens, min(max_rows, max_tokens)):
        differing.append(_difference(name, num_rows, part))
    found = [one for one in differing if one]
    # Ranks have other weights and other results; none may start alone.
    others = comm.all_gather(torch.tensor([len(found)], device=device), 0).tolist()
    if any(others):
        elsewhere = f"on ranks {[rank for rank, count in enumerate(others) if count]}"
        threads = torch.get_num_threads() if device.type == "cpu" else 1
        advice = "set model.numerics=fast" if threads == 1 else "set device.threads=1, or model.numerics=fast"
        raise ConfigError(
            f"model.numerics=invariant does not hold for this model on this machine with {_place(device)}: "
            f"{'; '.join(found) or elsewhere}; {advice}"
        )
    what = "numerics: invariant, %d parts proved with up to %d rows with %s in %.1f s"
    log.info(what, len(differing), max_tokens, _place(device), time.perf_counter() - start)


def _place(device: torch.device) -> str:
    if device.type != "cpu":
        return torch.cuda.get_device_name(device)
    return f"{torch.backends.cpu.get_cpu_capability()}, device.threads={torch.get_num_threads()}"


@torch.inference_mode()
def prove_decodes(
    model: Decoder,
    decodes: CapturedDecodes,
    attention: AttentionBackend,
    pool: KVPool,
    rows: DeviceRows,
    states: RecurrentStates | None = None,
) -> None:
    """Raise ConfigError if ``decodes`` gives rows other bits than the model does, layer by layer.

    pool, rows, states: unused; their content is changed."""
    max_rows, row_len = rows.tokens_RM.shape
    row_N = torch.arange(
        min(max_rows, pool.num_pages) if states is None else min(max_rows, pool.num_pages, WITH_STATES)
    )
    num_rows = len(row_N)
    if not decodes.fits(num_rows):
        return
    for layer in range(model.attention_spec.num_layers):
        for slots in (pool.keys(layer), pool.values(layer)):
            some = slots[: num_rows * pool.page_stride]
            some.copy_(_random(pool, *some.shape, dtype=pool.dtype))
    # A row has room for the token that comes next, and may be shorter than a page.
    positions_N, token_ids_N = row_N * 7 % min(pool.page_size, row_len - 1), row_N * 31 % model.vocab_size
    rows.tokens_RM[row_N, positions_N] = token_ids_N.to(torch.int32)
    rows.pages_RP[row_N, 0] = row_N.to(torch.int32)
    lengths = (positions_N + 1).numpy().astype(np.int32)
    before_NX = torch.empty(0) if states is None else _random(pool, num_rows, states.data.shape[1], dtype=torch.float32)
    if states is not None:
        states.data[:num_rows] = before_NX
    found_NV = decodes.launch(row_N.numpy(), lengths, SamplingVariant.LOGITS).logits_NV
    found_NX = torch.empty(0) if states is None else states.data[:num_rows].clone()
    table_NP = row_N[:, None].numpy().astype(np.int32)
    attention.plan_step(batch_on(pool.data.device, num_rows, table_NP, lengths, np.ones_like(lengths)))
    slots_N = row_N * pool.page_stride + positions_N
    step = StepTensors(token_ids_N, positions_N, slots_N, row_N, attention, pool)
    if states is not None:
        states.data[:num_rows] = before_NX
        step.states = StatesOfStep(states, row_N.numpy(), lengths, np.ones_like(lengths))
    is_same = found_NV is not None and torch.equal(model.forward(step), found_NV)
    if not is_same or (states is not None and not torch.equal(states.data[:num_rows], found_NX)):
        raise ConfigError(
            "model.numerics=invariant does not hold for this model on this machine: decode steps in one call of C give "
            "other bits than layer by layer; set CALLBOARD_KERNELS=torch, or model.numerics=fast"
        )


def pieces(num_rows: int) -> list[tuple[int, int]]:
    """Return neighbouring (first, last) of growing sizes: one of each up to 8, then a quarter larger each time."""
    found, first, size = [], 0, 1
    while first + size <= num_rows:
        found.append((first, first + size))
        first, size = first + size, size + max(1, size // 4)
    return [*found, (first, num_rows)] if first < num_rows else found


def _difference(name: str, num_rows: int, part: Rows) -> str:
    """Return '' if every piece has the same results as all rows together, else the difference."""
    together, found = part(0, num_rows), ""
    for first, last in pieces(num_rows):  # all of them: other ranks wait for this one's part of a sum
        if not torch.equal(part(first, last), together[first:last]) and not found:
            found = f"{name} gives a row other bits among {last - first} than among {num_rows}"
    return found


def _attention_difference(backend: AttentionBackend, spec: AttentionSpec, pool: KVPool) -> str:
    try:
        require_same_bits(backend, spec, pool)
    except AssertionError as error:
        return f"attention: {error}"
    return ""


def _recurrence_differences(model: Decoder, num_ranks: int) -> list[str]:
    """Return what each kind of recurrent layer gives other bits in shared steps than alone and at once."""
    found, seen = [], []
    for index, layer in enumerate(model.layers):
        whole = model.shape.layers[index].recurrent
        if whole is None or whole in seen or not isinstance(layer, HybridLayer) or layer.recurrent is None:
            continue
        seen.append(whole)
        shape = whole.of_rank(num_ranks)
        try:
            require_same_states(layer.recurrent, shape, model.shape.hidden_size, model.device, model.dtype)
        except AssertionError as error:
            found.append(f"layer {index}'s recurrence: {error}")
    return found


def _parts(
    model: Decoder, backend: AttentionBackend, pool: KVPool, sampler: Sampler, max_tokens: int, max_rows: int
) -> Iterator[tuple[str, int, Rows]]:
    """Yield (name, most rows, the part) of each kind of layer, and of the parts after the layers."""
    x_TD = _random(pool, max_tokens, model.shape.hidden_size, dtype=model.dtype)
    seen = []
    for index, layer in enumerate(model.layers):
        shape = model.shape.layers[index]
        if shape not in seen:
            seen.append(shape)
            for name, part in _layer_parts(model, layer, backend, pool, x_TD):
                yield f"layer {index}'s {name}", max_tokens, part
    # Log probabilities of prompts have more rows at a time than sampling has.
    max_scored = max(max_rows, min(max_tokens, SCORED_ROWS))
    yield "the LM head", max_scored, lambda first, last: model.logits(x_TD[first:last].clone())
    logits_NV = model.logits(x_TD[:max_scored].clone())
    yield "the log softmax", max_scored, lambda first, last: _logprobs(logits_NV[first:last])
    yield "the sampler", max_rows, _sampled(sampler, logits_NV)
    sampler.admit([_newcomer(row, WISHES[0]) for row in range(max_rows)], ())


def _layer_parts(
    model: Decoder, layer: DecoderLayer | HybridLayer, backend: AttentionBackend, pool: KVPool, x_TD: Tensor
) -> Iterator[tuple[str, Rows]]:
    for name in ("before_attention", "behind_attention", "before_mlp", "behind_mlp"):
        yield f"norm {name.replace('_', ' ')}", _norm(getattr(layer, name), model, x_TD)
    if (attention := layer.attention) is not None:
        yield "queries, keys and values", _projection(model, layer, attention, backend, pool, x_TD)
        spec = model.attention_spec
        attended_TQH = _random(pool, len(x_TD), spec.num_heads, spec.value_size, dtype=model.dtype)
        yield "attention's output", lambda first, last: attention.output(attended_TQH[first:last])
        if isinstance(attention, GatedAttention):
            gated = attention.gated
            yield (
                "attention's gate",
                lambda first, last: gated(attended_TQH[first:last].clone(), x_TD[first:last], model.kernels),
            )
    if isinstance(layer, HybridLayer) and isinstance(recurrent := layer.recurrent, RecurrentPart):
        yield "recurrent part's input", lambda first, last: recurrent.inner(x_TD[first:last])
        mixed_TM = _random(pool, len(x_TD), recurrent.outer.inputs_of_rank, dtype=model.dtype)
        yield "recurrent part's output", lambda first, last: recurrent.output(mixed_TM[first:last])
    if (mlp := layer.mlp) is not None:
        yield "MLP", lambda first, last: mlp(x_TD[first:last].clone(), model.kernels)


def _norm(norm: Norm, model: Decoder, x_TD: Tensor) -> Rows:
    """Return the norm of rows, and of their sums with other ones, side by side."""
    update_TD = x_TD.flip(0)

    def both(first: int, last: int) -> Tensor:
        x, update = x_TD[first:last].clone(), update_TD[first:last].clone()
        return torch.cat((norm(x), norm.added(x, update, model.kernels)), 1)

    return both


def _projection(
    model: Decoder,
    layer: DecoderLayer | HybridLayer,
    attention: Attention,
    backend: AttentionBackend,
    pool: KVPool,
    x_TD: Tensor,
) -> Rows:
    """Return queries, and the keys and values in the pool afterwards, side by side."""
    positions_T = torch.arange(len(x_TD), device=x_TD.device)
    slots_T = positions_T // pool.page_size * pool.page_stride + positions_T % pool.page_size
    rotary, kernels = None if layer.rotary is None else model.rotaries[layer.rotary], model.kernels

    def project(first: int, last: int) -> Tensor:
        at_T, to_T = positions_T[first:last], slots_T[first:last]
        step = StepTensors(at_T, at_T, to_T, at_T, backend, pool)
        angles = () if rotary is None else rotary.angles(at_T, kernels)
        q_TQH = attention.project(0, x_TD[first:last].clone(), rotary, angles, step, kernels)
        return torch.cat((q_TQH, *pool.read(0, to_T)), 1)

    return project


def _sampled(sampler: Sampler, logits_NV: Tensor) -> Rows:
    """Return each row's token, the first that it samples."""

    def sample(first: int, last: int) -> Tensor:
        rows = range(first, last)
        wishes = [PENALISED if row == PENALISED_ROW else WISHES[row % len(WISHES)] for row in rows]
        sampler.admit([_newcomer(*one) for one in zip(rows, wishes, strict=True)], ())
        row_N = np.array(rows)
        return sampler.sample(logits_NV[first:last], row_N, row_N + 1).token_ids_N

    return sample


def _newcomer(row: int, wishes: SamplingParams) -> Newcomer:
    return Newcomer(row, wishes.replace(seed=row), np.zeros(1, dtype=np.int32), 1)


def _logprobs(logits_NV: Tensor) -> Tensor:
    """Return log probabilities per row: of its first token and of the likeliest ones, and their ids, side by side."""
    row_N = np.arange(len(logits_NV))
    token_ids_N = torch.zeros_like(logits_NV[:, 0], dtype=torch.int64)
    found = batch_logprobs(logits_NV, token_ids_N, row_N, np.ones_like(row_N))
    return torch.cat((found.chosen_L[:, None], found.top_LK, found.top_ids_LK.float()), 1)


def _random(pool: KVPool, *shape: int, dtype: torch.dtype) -> Tensor:
    """Return random numbers on the pool's device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED)).to(pool.data.device, dtype)
