"""Linear attention with decay, and the delta rule: a row's keys and values are summed in one matrix for each head.

Legend: T new tokens of a step · H heads · K size of a key · V size of a value · S slots · B rows of the step
        C tokens of a chunk · N chunks
Owns: the recurrence of one token, and the same for many tokens by products of matrices.
Does not know: where queries, keys, values and decays come from, slots.

A head's matrix M is multiplied by the token's decay, changed by its key and value, and read by its query:
M <- exp(g) M + k (x) v, and o = q M (Dao and Gu 2024, where v has the step size in it).  The delta rule (Yang et al.
2024) adds only what M does not already give for the key: k (x) b (v - k exp(g) M), where b is between 0 and 1 or 2.

The two forms have different bits.  Tokens alone have the first one.  All numbers are float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers.states import StatesOfStep

CHUNK = 64  # tokens that one product takes
LARGE = 1 << 15  # numbers of a row's matrices from which a CPU's time goes into moving them


@dataclass(frozen=True, slots=True)
class RecurrenceTerms:
    """The terms of a recurrence for some tokens, float32.

    q_THK, k_THK, v_THV.  g_TH: logarithm of the decay, at most 0.
    b_TH: factor of the delta rule; None if keys and values are only added."""

    q_THK: Tensor
    k_THK: Tensor
    v_THV: Tensor
    g_TH: Tensor
    b_TH: Tensor | None = None

    def at(self, tokens: slice | Tensor) -> "RecurrenceTerms":
        """Return the terms of some of the tokens."""
        b_TH = None if self.b_TH is None else self.b_TH[tokens]
        return RecurrenceTerms(self.q_THK[tokens], self.k_THK[tokens], self.v_THV[tokens], self.g_TH[tokens], b_TH)


def advance(terms: RecurrenceTerms, states_SHKV: Tensor, step: StatesOfStep) -> Tensor:
    """Return o_THV, and advance the matrices of the step's rows."""
    if states_SHKV.device.type == "cpu" and states_SHKV[0].numel() >= LARGE:
        return _in_place(terms, states_SHKV, step)
    m_BHKV = step.read(states_SHKV)
    if step.only_decodes:
        o_THV = one_token(terms, m_BHKV)
    else:
        o_THV = torch.empty_like(terms.v_THV)
        if step.singles is not None:
            rows, tokens = step.singles
            m_DHKV = m_BHKV[rows]
            o_THV[tokens] = one_token(terms.at(tokens), m_DHKV)
            m_BHKV[rows] = m_DHKV
        for row, segment in step.segments:
            o_THV[segment], m_BHKV[row] = many_tokens(terms.at(segment), m_BHKV[row])
    step.write(states_SHKV, m_BHKV)
    return o_THV


def _in_place(terms: RecurrenceTerms, states_SHKV: Tensor, step: StatesOfStep) -> Tensor:
    """Advance the matrices of row after row where they lie: on a CPU most of the time is spent on moving them."""
    o_THV = torch.empty_like(terms.v_THV)
    for slot, begins, tokens in step.rows():
        m_HKV = states_SHKV[slot]
        if begins:
            m_HKV.zero_()
        mine = terms.at(tokens)
        if len(mine.v_THV) == 1:
            o_THV[tokens] = one_token(mine, m_HKV[None])
        else:
            o_THV[tokens], after_HKV = many_tokens(mine, m_HKV)
            m_HKV.copy_(after_HKV)
    return o_THV


def one_token(terms: RecurrenceTerms, m_BHKV: Tensor) -> Tensor:
    """Return o_BHV of one token of each row, and advance the matrices in place.

    Key and query read M together, before it changes; what the token adds for its query follows from both."""
    decay_BH1, q_BHK, k_BHK, v_BHV = terms.g_TH.exp()[..., None], terms.q_THK, terms.k_THK, terms.v_THV
    read_BH2V = torch.matmul(torch.stack((q_BHK, k_BHK), -2), m_BHKV) * decay_BH1[..., None]
    found_BHV, known_BHV = read_BH2V.unbind(-2)
    if terms.b_TH is not None:
        v_BHV = (v_BHV - known_BHV) * terms.b_TH[..., None]
    m_BHKV.mul_(decay_BH1[..., None])
    m_BHKV.flatten(0, 1).baddbmm_(k_BHK.flatten(0, 1)[..., None], v_BHV.flatten(0, 1)[:, None])
    return found_BHV + (q_BHK * k_BHK).sum(-1, keepdim=True) * v_BHV


def many_tokens(terms: RecurrenceTerms, m_HKV: Tensor) -> tuple[Tensor, Tensor]:
    """Return o_THV of one row's tokens, and its matrices after them.

    In a chunk a token's values are those that it adds to M, whatever M is, less what it finds of the M before the
    chunk; both follow from a triangular system in the keys of the chunk."""
    num_tokens = len(terms.v_THV)
    padding = -num_tokens % CHUNK
    q, k, v = (_in_chunks(one, padding) for one in (terms.q_THK, terms.k_THK, terms.v_THV))
    g_HNC = _in_chunks(terms.g_TH.unsqueeze(-1), padding).squeeze(-1).cumsum(-1)
    from_start = g_HNC.exp().unsqueeze(-1)
    to_end = (g_HNC[..., -1:] - g_HNC).exp().unsqueeze(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between_HNCC = (g_HNC.unsqueeze(-1) - g_HNC.unsqueeze(-2)).masked_fill_(later, -torch.inf).exp_()
    seen_HNCC = (q @ k.transpose(-1, -2)).mul_(between_HNCC)
    found = None
    if terms.b_TH is not None:
        b = _in_chunks(terms.b_TH.unsqueeze(-1), padding)
        system = (k * b @ k.transpose(-1, -2)).mul_(between_HNCC)  # its diagonal is not read
        both = torch.cat((v * b, k * b * from_start), -1)
        v, found = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True).split(
            (v.shape[-1], k.shape[-1]), -1
        )
    q, k, whole = q * from_start, (k * to_end).transpose(-1, -2), from_start[..., -1:, :]
    outs = []
    for chunk in range(q.shape[1]):
        v_HCV = v[:, chunk] if found is None else v[:, chunk] - found[:, chunk] @ m_HKV
        outs.append(q[:, chunk] @ m_HKV + seen_HNCC[:, chunk] @ v_HCV)
        m_HKV = m_HKV * whole[:, chunk] + k[:, chunk] @ v_HCV
    return torch.cat(outs, 1)[:, :num_tokens].transpose(0, 1), m_HKV


def _in_chunks(x_THX: Tensor, padding: int) -> Tensor:
    """Return [H, N, C, X].  Tokens of padding are zeros, and so add nothing and decay nothing."""
    filled = torch.nn.functional.pad(x_THX, (0, 0, 0, 0, 0, padding))
    return filled.transpose(0, 1).unflatten(1, (-1, CHUNK))
