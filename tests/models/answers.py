"""Writes a tiny checkpoint of every family, and the tokens that transformers generates from it.

    python -m tests.models.answers build/families

``benchmarks/gpu_check.py --sections families`` compares an engine on a GPU with them.  An architecture that the
installed transformers lacks is left out.
"""

import json
import os
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch
from tqdm import tqdm

from tests.models.checkpoints import build, random_tokens, save
from tests.models.test_families import CHECKED

LENGTHS = (1, 5, 33, 70)
NUM_TOKENS = 24
FILE = "answers.json"


def write(variant: str, directory: Path) -> None:
    """Write one checkpoint and its answers: a list of prompts and one of what follows each."""
    torch.set_num_threads(1)
    reference = build(variant)
    save(reference, directory)
    prompts = [random_tokens(length, seed=length) for length in LENGTHS]
    tokens = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        # No end of text: a tiny model may generate it at once.
        limits = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "eos_token_id": None}
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **limits)
        tokens.append(out[0, len(prompt) :].tolist())
    (directory / FILE).write_text(json.dumps({"prompts": prompts, "tokens": tokens}))


def main(folder: Path) -> None:
    """Write all of them, one per processor at a time."""
    shutil.rmtree(folder, ignore_errors=True)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        writing = {pool.submit(write, variant, folder / variant): variant for variant in CHECKED}
        for done in tqdm(as_completed(writing), total=len(writing)):
            try:
                done.result()
            except AttributeError as error:  # transformers has no such class
                print(f"{writing[done]} is left out: {error}")
                shutil.rmtree(folder / writing[done], ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
