"""Batches on this machine, without HTTP: how many tokens a second the engine makes of a load that is there at once.

Owns: the field's standard job, the clock around it.  Does not know: how results are shown.
The job is that of nano-vLLM's bench.py: 256 sequences of 100 to 1,024 random tokens, 100 to 1,024 new tokens each,
drawn by Python's generator from seed 0, so rates can stand beside those of others.
"""

import time
from random import Random
from typing import Any

from engine.config import Config
from engine.types.params import SamplingParams

SEED, LARGEST_ID = 0, 10_000


def draw_job(
    num_sequences: int = 256, longest: int = 1024, largest_id: int = LARGEST_ID
) -> tuple[list[list[int]], list[int]]:
    """(prompts, numbers of new tokens)."""
    drawn = Random(SEED)
    shortest = min(100, longest)
    prompts = [
        [drawn.randint(0, largest_id) for _ in range(drawn.randint(shortest, longest))] for _ in range(num_sequences)
    ]
    return prompts, [drawn.randint(shortest, longest) for _ in range(num_sequences)]


def run(config: Config, num_sequences: int, longest: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Returns what was done, and figures of one run after another one to warm up, with other tokens.

    longest: less where the model's context has no room for a prompt and an output of that."""
    from engine.llm import LLM

    with LLM(config=config) as llm:
        largest_id = min(LARGEST_ID, llm.vocab_size - 1)
        longest = min(longest, llm.max_model_len // 2)
        prompts, lengths = draw_job(num_sequences, longest, largest_id)
        params = [SamplingParams(temperature=0.6, max_tokens=length, ignore_eos=True) for length in lengths]
        others = [[largest_id - token for token in prompt] for prompt in prompts]
        llm.generate(others, params)
        began = time.perf_counter()
        llm.generate(prompts, params)
        seconds = time.perf_counter() - began
    num_prompt, num_output = sum(map(len, prompts)), sum(lengths)
    asked = {"model": config.model.name or config.model.path, "sequences": num_sequences, "longest": longest}
    return asked, {
        "requests": num_sequences,
        "failed": 0,
        "seconds": round(seconds, 3),
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "requests_per_s": round(num_sequences / seconds, 3),
        "output_tokens_per_s": round(num_output / seconds, 2),
        "total_tokens_per_s": round((num_prompt + num_output) / seconds, 2),
    }
