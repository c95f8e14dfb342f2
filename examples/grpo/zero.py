"""The largest difference between what a sampler reports and what a trainer computes, while weights change: 0.0.

    python examples/grpo/zero.py        # the demo model, under a minute

An engine draws answers in groups, with proposed tokens, cached prefixes and few pages, on two ranks.  In the middle of
each batch the weights change, and the answers go on with the new ones.  A trainer then computes the log probability of
each token anew, with the weights of the version that the answer names for it.
"""

import argparse
import copy
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from callboard import LLM, Completion, SamplingParams
from callboard.training import TrainedModel, log_probs

MODEL = Path(__file__).parents[1] / "demo_model"
TABLES: dict[str, dict[str, Any]] = {
    "model": {"dtype": "float32", "numerics": "invariant", "tokenizer": "none"},
    "kv": {"num_pages": 60},
    "device": {"tensor_parallel": 2, "threads": 1},
    "plugins": {"proposer": "ngram"},
}
DRAWN_BY = SamplingParams(
    temperature=0.8, top_p=0.95, max_tokens=48, ignore_eos=True, logprobs=0, processed_logprobs=True
)
GROUP, PROMPT_TOKENS = 4, 40
FIRST_PAUSE_S = 0.1


class Found(NamedTuple):
    """What one batch has shown.  difference: the largest.  spanning: answers with tokens of two versions."""

    difference: float
    num_tokens: int
    spanning: int


def batches(model: Path, num: int, more: dict[str, dict[str, Any]] | None = None) -> Iterator[Found]:
    """Draw and compare batches.  more: tables of the sampler's configuration in place of ``TABLES``."""
    tables = {name: {**table, **(more or {}).get(name, {})} for name, table in TABLES.items()}
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(3, module.config.vocab_size, (PROMPT_TOKENS,), generator=generator).tolist()
    prompts = [[*shared, 3 + number] for number in range(4) for _ in range(GROUP)]
    trained, pause_s = {"0": TrainedModel(module, {"model": {"dtype": "float32"}})}, FIRST_PAUSE_S
    try:
        with LLM(model, config=tables, progress=False) as llm:
            for number in range(num):
                params = [DRAWN_BY.replace(seed=1000 * number + index) for index in range(len(prompts))]
                drawing = Drawing(llm, prompts, params)
                time.sleep(pause_s)
                module, version = copy.deepcopy(module), str(number + 1)
                with torch.no_grad():
                    for one in module.parameters():
                        one.add_(0.02 * torch.randn(one.shape, generator=generator))
                llm.weights.update(dict(module.named_parameters()), version=version)
                trained[version] = TrainedModel(module, {"model": {"dtype": "float32"}})
                drawing.join()
                pause_s = drawing.took_s / 3  # the middle of the next batch, on a fast and on a slow machine
                yield compared(prompts, drawing.drawn, trained)
                trained.pop(str(number)).close()
    finally:
        for model_of_version in trained.values():
            model_of_version.close()


class Drawing(threading.Thread):
    """A batch that is drawn.  drawn: once it is.  took_s: for that."""

    def __init__(self, llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> None:
        super().__init__()
        self._llm, self._prompts, self._params = llm, prompts, params
        self.drawn: list[Completion] = []
        self.took_s = 0.0
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        self.drawn = self._llm.generate(self._prompts, self._params, progress=False)
        self.took_s = time.monotonic() - began


def compared(prompts: list[list[int]], drawn: list[Completion], trained: dict[str, TrainedModel]) -> Found:
    """Return how far what was reported is from what the models of its versions compute."""
    sequences = [prompt + one.token_ids for prompt, one in zip(prompts, drawn, strict=True)]
    first = min(trained, key=int)
    scored = {version: log_probs(model, sequences, DRAWN_BY) for version, model in trained.items()}
    largest, spanning = 0.0, 0
    for index, one in enumerate(drawn):
        reported = torch.tensor([entry.sampled.logprob for entry in one.logprobs])
        begins = [(0, first), *one.weight_versions]
        spanning += sum(begin > 0 for begin, _ in begins)
        for (begin, version), (end, _) in zip(begins, [*begins[1:], (len(reported), "")], strict=True):
            if version not in scored:
                return Found(float("inf"), 0, spanning)  # of weights that were gone when the answer was asked for
            found = scored[version][index].detach()[-len(reported) :]
            if end > begin:
                largest = max(largest, float((found[begin:end] - reported[begin:end]).abs().max()))
    return Found(largest, sum(len(one.token_ids) for one in drawn), spanning)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    found = list(batches(MODEL, arguments.batches))
    for number, one in enumerate(found):
        print(
            f"batch {number}: {one.num_tokens} tokens, {one.spanning} answers of two versions, {one.difference} apart"
        )
    print(f"largest difference of log probabilities: {max(one.difference for one in found)}")


if __name__ == "__main__":
    main()
