"""Log probabilities of sampled tokens under the model itself: before any adjustment, cut or temperature.

Legend: N sampled rows of the batch · L rows with logprobs · V vocabulary · K alternatives · W most named tokens
Owns: computing them on the device, and their form in messages.  Does not know: how tokens were picked.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.types.logprobs import Logprobs
from engine.types.params import MAX_LOGPROBS

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
        for at, one in self.messages().items():
            row = int(rows_N[at])
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
) -> BatchLogprobs:
    """Compute the log probabilities of rows ``at``.  The numbers of a failed row (token -1) have no meaning."""
    vocab_size = logits_NV.shape[1]
    if len(at) < len(logits_NV):
        at_L = torch.from_numpy(at).to(logits_NV.device, non_blocking=True)
        logits_NV, token_ids_N = logits_NV.index_select(0, at_L), token_ids_N.index_select(0, at_L)
    asked_LV = logits_NV.to(torch.float32)
    if odd := -vocab_size % ALIGNED:
        # A GPU's order of additions depends on a row's alignment in memory, so rows are padded to be aligned.
        asked_LV = F.pad(asked_LV, (0, odd), value=-torch.inf)
    logprobs_LV = torch.log_softmax(asked_LV, dim=-1)[:, :vocab_size]
    chosen_L1 = logprobs_LV.gather(1, token_ids_N.clamp(min=0)[:, None])
    # All or none, so that the choice among equal tokens does not depend on other rows.
    wants_none = logits_NV.device.type == "cpu" and not num_top.any()
    top_LK, top_ids_LK = logprobs_LV.topk(0 if wants_none else min(MAX_LOGPROBS, vocab_size), dim=-1)
    if named is not None:
        named = replace(named, values_LW=logprobs_LV.gather(1, named.ids_LW))
    return BatchLogprobs(at, num_top, chosen_L1.squeeze(1), top_ids_LK.to(torch.int32), top_LK, named)


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
