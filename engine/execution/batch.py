"""A ``Step`` as flat arrays: which row and position every token of the batch has.

Legend: T new tokens in the step (ragged, packed) · B sequences · D decode rows · N sampled rows
Owns: the order of a batch (decodes first, then prefill segments).  Does not know: devices, tensors, what tokens are.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.messages import Step

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one step.

    rows_B, query_lengths_B, lengths_B: per sequence its row, new tokens, and context length including them.
    query_starts_B1: index in T of its first new token, and at the end the number of all new tokens.
    rows_T, positions_T: per new token.  sample_at_N: index in T of every position whose next token is wanted.
    sample_rows_N: row of each, one row may have several.  sample_positions_N: position of each sampled token.
    """

    num_decodes: int
    rows_B: Int64
    query_lengths_B: Int32
    lengths_B: Int32
    query_starts_B1: Int64
    rows_T: Int64
    positions_T: Int64
    sample_at_N: Int64
    sample_rows_N: Int64
    sample_positions_N: Int64


def decode_rows(step: Step) -> Int64:
    """Return the rows that get one token each."""
    return np.frombuffer(step.decode_rows, dtype=np.int32).astype(np.int64)


def lay_out(step: Step, computed: Int32) -> Batch:
    """Return the batch of ``step``; ``computed`` [rows], the positions of each row with K/V, is advanced."""
    decodes = decode_rows(step)
    num_decodes = len(decodes)
    if not step.prefill_rows:
        # A new array each time: the scheduler's view of a step must not change with the next one.
        positions = computed[decodes].astype(np.int64)
        starts_B1 = np.arange(num_decodes + 1)
        lengths = positions.astype(np.int32) + 1
        computed[decodes] = lengths
        return Batch(
            num_decodes=num_decodes,
            rows_B=decodes,
            query_lengths_B=np.ones(num_decodes, dtype=np.int32),
            lengths_B=lengths,
            query_starts_B1=starts_B1,
            rows_T=decodes,
            positions_T=positions,
            sample_at_N=starts_B1[:-1],
            sample_rows_N=decodes,
            sample_positions_N=positions + 1,
        )
    prefill_rows = np.frombuffer(step.prefill_rows, dtype=np.int32).astype(np.int64)
    starts_B = np.concatenate((computed[decodes], np.frombuffer(step.prefill_starts, dtype=np.int32)))
    query_lengths_B = np.concatenate(
        (np.ones(num_decodes, dtype=np.int32), np.frombuffer(step.prefill_lengths, dtype=np.int32))
    )
    rows_B = np.concatenate((decodes, prefill_rows))
    lengths_B = starts_B + query_lengths_B
    computed[rows_B] = lengths_B
    query_starts_B1 = np.zeros(len(rows_B) + 1, dtype=np.int64)
    np.cumsum(query_lengths_B, out=query_starts_B1[1:])
    rows_T = np.repeat(rows_B, query_lengths_B)
    # Position = index in T, shifted so that the sequence's first new token lands on its start.
    positions_T = np.arange(len(rows_T)) + np.repeat(starts_B - query_starts_B1[:-1], query_lengths_B)
    samples_B = np.concatenate((query_lengths_B[:num_decodes], np.frombuffer(step.prefill_samples, dtype=np.int32)))
    # The last positions of each sequence, counted from its end.
    first_N = np.cumsum(samples_B) - samples_B
    before_end_N = np.repeat(samples_B + first_N, samples_B) - np.arange(int(samples_B.sum()))
    return Batch(
        num_decodes=num_decodes,
        rows_B=rows_B,
        query_lengths_B=query_lengths_B,
        lengths_B=lengths_B,
        query_starts_B1=query_starts_B1,
        rows_T=rows_T,
        positions_T=positions_T,
        sample_at_N=np.repeat(query_starts_B1[1:], samples_B) - before_end_N,
        sample_rows_N=np.repeat(rows_B, samples_B),
        sample_positions_N=np.repeat(lengths_B, samples_B) + 1 - before_end_N,
    )
