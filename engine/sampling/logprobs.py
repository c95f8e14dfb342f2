"""Log probabilities of sampled tokens under the model itself: before any adjustment, cut or temperature.

Legend: N sampled rows of the batch · L rows with logprobs · V vocabulary · K alternatives · W most named tokens
Owns: computing them on the device, and their form in messages.  Does not know: how tokens were picked.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.types.logprobs import Logprobs
from engine.types.params import MAX_LOGPROBS

if TYPE_CHECKING:
    from engine.kernels.cpu import CPUKernels

ALIGNED = 8  # 16-bit logits of a 16-byte load of a GPU


@dataclass(frozen=True, slots=True)
class Named:
    """Tokens that requests name, returned in place of the most likely ones.

    ids: int64, one array per row, empty if the row names none.
    ids_LW: the same on the device, padded with 0.  values_LW: float32, their log probabilities, once computed."""

    ids: Sequence[npt.NDArray[np.int64]]
    ids_LW: Tensor
    values_LW: Tensor | None = None


def named_tokens(ids: Sequence[npt.NDArray[np.int64]], device: torch.device) -> Named | None:
    """Return the named tokens; None if no row names any."""
    longest = max(map(len, ids), default=0)
    if not longest:
        return None
    ids_LW = np.zeros((len(ids), longest), dtype=np.int64)
    for line, of_row in zip(ids_LW, ids, strict=True):
        line[: len(of_row)] = of_row
    return Named(ids, torch.from_numpy(ids_LW).to(device, non_blocking=True))


@dataclass(frozen=True, slots=True)
class BatchLogprobs:
    """Log probabilities of the rows of a batch that request them.

    at, num_top: int64 on the host, index in the batch and number of alternatives of each such row.
    chosen_L: float32.  top_ids_LK: int32, top_LK: float32, most likely first.  named: None if no row names tokens."""

    at: npt.NDArray[np.int64]
    num_top: npt.NDArray[np.int64]
    chosen_L: Tensor
    top_ids_LK: Tensor
    top_LK: Tensor
    named: Named | None = None

    def to_host(self) -> "BatchLogprobs":
        """Queue the copy to pinned memory; it can be read after an event recorded after this call."""
        named = self.named
        if named is not None and named.values_LW is not None:
            named = replace(named, values_LW=pinned_copy(named.values_LW))
        return replace(
            self,
            named=named,
            chosen_L=pinned_copy(self.chosen_L),
            top_ids_LK=pinned_copy(self.top_ids_LK),
            top_LK=pinned_copy(self.top_LK),
        )

    def messages(self) -> dict[int, Logprobs]:
        """Return index in the batch -> log probabilities.  The tensors must be on the host."""
        chosen, top_ids, top = self.chosen_L.tolist(), self.top_ids_LK.numpy(), self.top_LK.numpy()
        if not top.shape[1] and self.named is None:
            return {at: Logprobs(logprob=one) for at, one in zip(self.at.tolist(), chosen, strict=True)}
        messages = {
            at: Logprobs(logprob=chosen[i], top_ids=top_ids[i, :num].tobytes(), top_logprobs=top[i, :num].tobytes())
            for i, (at, num) in enumerate(zip(self.at.tolist(), self.num_top.tolist(), strict=True))
        }
        if self.named is not None and self.named.values_LW is not None:
            for i, (at, ids) in enumerate(zip(self.at.tolist(), self.named.ids, strict=True)):
                if len(ids):
                    values = self.named.values_LW[i, : len(ids)].numpy().tobytes()
                    messages[at] = Logprobs(
                        logprob=chosen[i], top_ids=ids.astype(np.int32).tobytes(), top_logprobs=values
                    )
        return messages

    def by_row(self, rows_N: npt.NDArray[np.int64]) -> dict[str, dict[int, Any]]:
        """Return the fields of ``StepExtras``: row -> those of its first token, and of later tokens if it has any."""
        first: dict[int, Logprobs] = {}
        later: dict[int, tuple[Logprobs, ...]] = {}
        messages = self.messages()
        rows = rows_N[np.fromiter(messages, np.int64, len(messages))].tolist()
        for row, one in zip(rows, messages.values(), strict=True):
            if row in first:
                later[row] = (*later.get(row, ()), one)
            else:
                first[row] = one
        return {"logprobs": first, "later_logprobs": later}


def batch_logprobs(
    logits_NV: Tensor,
    token_ids_N: Tensor,
    at: npt.NDArray[np.int64],
    num_top: npt.NDArray[np.int64],
    named: Named | None = None,
    on_cpu: "CPUKernels | None" = None,
) -> BatchLogprobs:
    """Compute the log probabilities of rows ``at``.  The numbers of a failed row (token -1) have no meaning.

    on_cpu: adds each row's exponentials."""
    vocab_size = logits_NV.shape[1]
    if len(at) == len(logits_NV):  # they are sorted, so these are all rows
        asked_LV, asked_L = logits_NV.to(torch.float32), token_ids_N
    else:
        at_L = torch.from_numpy(at).to(logits_NV.device, non_blocking=True)
        asked_LV, asked_L = logits_NV.index_select(0, at_L).to(torch.float32), token_ids_N.index_select(0, at_L)
    asked_L1 = asked_L.clamp(min=0)[:, None]
    # All or none, so that the choice among equal tokens does not depend on other rows.
    wants_none = logits_NV.device.type == "cpu" and not num_top.any()
    if on_cpu is not None:
        top_L, log_L = on_cpu.log_sums(asked_LV)
        if wants_none and named is None:
            chosen_L = asked_LV.gather(1, asked_L1).squeeze(1).sub_(top_L).sub_(log_L)
            none_L0 = chosen_L.new_empty((len(at), 0))
            return BatchLogprobs(at, num_top, chosen_L, none_L0.to(torch.int32), none_L0, named)
        logprobs_LV = (asked_LV - top_L[:, None]).sub_(log_L[:, None])
    else:
        logprobs_LV = _log_softmax(asked_LV)
    chosen_L1 = logprobs_LV.gather(1, asked_L1)
    top_LK, top_ids_LK = logprobs_LV.topk(0 if wants_none else min(MAX_LOGPROBS, vocab_size), dim=-1)
    if named is not None:
        named = replace(named, values_LW=logprobs_LV.gather(1, named.ids_LW))
    return BatchLogprobs(at, num_top, chosen_L1.squeeze(1), top_ids_LK.to(torch.int32), top_LK, named)


def _log_softmax(asked_LV: Tensor) -> Tensor:
    vocab_size = asked_LV.shape[1]
    if odd := -vocab_size % ALIGNED:
        # A GPU's order of additions depends on a row's alignment in memory, so rows are padded to be aligned.
        asked_LV = F.pad(asked_LV, (0, odd), value=-torch.inf)
    return torch.log_softmax(asked_LV, dim=-1)[:, :vocab_size]


def joined_logprobs(parts: Sequence[BatchLogprobs]) -> BatchLogprobs:
    """Join parts, in which every row has log probabilities, to one batch."""
    num_top = np.concatenate([part.num_top for part in parts])
    width = max(part.top_LK.shape[1] for part in parts)

    def top(one_LK: Tensor) -> Tensor:
        return F.pad(one_LK, (0, width - one_LK.shape[1]))

    return BatchLogprobs(
        at=np.arange(len(num_top)),
        num_top=num_top,
        chosen_L=torch.cat([part.chosen_L for part in parts]),
        top_ids_LK=torch.cat([top(part.top_ids_LK) for part in parts]),
        top_LK=torch.cat([top(part.top_LK) for part in parts]),
    )


def pinned_copy(tensor: Tensor) -> Tensor:
    """Return a copy on the host, queued."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
