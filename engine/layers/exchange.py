"""The sum over ranks with whole experts, by an all-to-all: a rank sends a token's result only if it has one.

Every rank has all tokens, as attention needs them, so none is sent to an expert.  Each rank is the home of a share of
the tokens: there the results of the ranks that have a token's experts are added, in the order of ranks, and the sums go
to all.  A sum over all ranks would send zeros for the tokens that chose no expert of a rank.

Legend: T tokens of the step · D model dim · K experts of a token · R ranks · S tokens of a share, the last may be less
        N results that a rank sends
Owns: the homes, which results are sent.  Does not know: experts, the library.
"""

import torch
from torch import Tensor

from engine.layers.comm import ExchangingComm


def exchanged_sum(comm: ExchangingComm, part_TD: Tensor, owners_TK: Tensor) -> Tensor:
    """Return the sum of all ranks' parts, the same bits on all.

    part: this rank's, whose rows are zeros for tokens of other owners.  owners: the rank of each chosen expert, alike
    on all ranks.  The sizes of what is sent are read on the host."""
    num_tokens, ranks = len(part_TD), comm.size
    if not num_tokens:
        return part_TD
    share = -(-num_tokens // ranks)
    has_RT = torch.zeros(ranks, ranks * share, dtype=torch.bool, device=part_TD.device)
    tokens_TK = torch.arange(num_tokens, device=part_TD.device)[:, None].expand_as(owners_TK)
    has_RT[owners_TK, tokens_TK] = True
    has_RRS = has_RT.view(ranks, ranks, share)  # owner, home, token of the home
    counts: list[list[int]] = has_RRS.sum(-1).tolist()
    received = [row[comm.rank] for row in counts]
    mine_N = has_RT[comm.rank].nonzero()[:, 0]
    rows_ND = comm.all_to_all(part_TD.index_select(0, mine_N), counts[comm.rank], received)
    sum_SD = part_TD.new_zeros(share, part_TD.shape[1])
    for owner, rows in enumerate(rows_ND.split(received)):
        sum_SD.index_add_(0, has_RRS[owner, comm.rank].nonzero()[:, 0], rows)
    return comm.all_gather(sum_SD, 0)[:num_tokens]
