"""The sampler on the device next to the one on the CPU."""

import numpy as np
import torch

from engine.sampling.sampler import Sampler
from engine.sampling.state import Newcomer
from engine.types.params import SamplingParams
from gpu_sections.rows import Row, seconds_of


def sampler(device: torch.device) -> list[Row]:
    """Every kind of request in one batch: the same tokens as on the CPU."""
    vocab_size, num_rows = 5000, 12
    wishes = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, seed=1),
        SamplingParams(temperature=1.0, top_k=20, seed=2),
        SamplingParams(temperature=1.0, top_p=0.9, seed=3),
        SamplingParams(temperature=1.0, min_p=0.05, seed=4, logprobs=3),
        SamplingParams(temperature=0.7, repetition_penalty=1.2, frequency_penalty=0.5, logit_bias={7: 5.0}, seed=5),
    ]
    logits = torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(0)) * 3
    results, seconds = [], 0.0
    for where in (torch.device("cpu"), device):
        one = Sampler(num_rows, vocab_size, 512, where)
        for row in range(num_rows):
            one.admit((Newcomer(row, wishes[row % len(wishes)], np.arange(20, dtype=np.int32) + row, 20),), (2,))
        ours = logits.to(where)
        rows = np.arange(num_rows)
        tokens = [one.sample(ours, rows, np.full(num_rows, 20 + step)).token_ids_N.cpu() for step in range(8)]
        results.append(torch.stack(tokens))
        seconds = seconds_of(lambda one=one, ours=ours, rows=rows: one.sample(ours, rows, np.full(num_rows, 40)), where)
    differing = int((results[0] != results[1]).sum())
    return [{"case": "mixed batch of 12", "ok": differing == 0, "error": differing, "us": seconds * 1e6}]
