"""Output tokens per second of rollouts, beside transformers' ``generate``, which TRL calls on a CPU.

A batch as a trainer asks for it: 8 prompts, 8 sampled answers of 512 tokens for each, with the log probability of every
token as it was drawn.  callboard computes with invariant numerics, so that a trainer finds the same bits
(``callboard.training``).  Both run in this process on the same weights in float32, with the same threads, in turns.
transformers returns no log probabilities here: TRL computes them with another pass over the batch, eight answers at a
time.  That pass is timed too, and the second ratio counts it.

With --ragged answers end after an eighth of the tokens to all of them, as answers do that end by themselves: a static
batch runs until its longest one has ended.

    python benchmarks/bench_rollouts.py --json benchmarks/results/rollouts_2core_cpu.json
    python benchmarks/bench_rollouts.py --model smollm2 --turns 1      # the shape of SmolLM2-135M, random weights
    python benchmarks/bench_rollouts.py --answers 2 --tokens 16 --turns 1   # a smoke run
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from machine import keep, new_parser
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from callboard import LLM, SamplingParams

DEMO = Path(__file__).parent.parent / "examples" / "demo_model"
NUM_PROMPTS, PROMPT_TOKENS = 8, 64
ROWS_AT_ONCE = 8  # of TRL's pass: the default of per_device_train_batch_size


def smollm2_shape() -> PreTrainedModel:
    """A model of SmolLM2-135M's shape."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        )
    )


@torch.inference_mode()
def run_transformers(model: PreTrainedModel, prompts: torch.Tensor, answers: int, tokens: int) -> torch.Tensor:
    """Sample a static batch, the best case for ``generate``: equal lengths, all finish together.

    Returns prompts with answers, int64."""
    repeated = prompts.repeat_interleave(answers, dim=0)
    sampled: torch.Tensor = model.generate(
        repeated,
        attention_mask=torch.ones_like(repeated),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        pad_token_id=0,
    )
    return sampled


@torch.inference_mode()
def log_probs(model: PreTrainedModel, sampled: torch.Tensor) -> torch.Tensor:
    """Return the log probabilities of the tokens behind the prompts, computed as TRL does."""
    tokens = sampled.shape[1] - PROMPT_TOKENS
    found = []
    for rows in sampled.split(ROWS_AT_ONCE):
        logits = model(rows, logits_to_keep=tokens + 1).logits[:, :-1]
        chosen = rows[:, PROMPT_TOKENS:, None]
        found.append(torch.stack([a.log_softmax(-1).gather(-1, b)[:, 0] for a, b in zip(logits, chosen, strict=True)]))
    return torch.cat(found)


def measure(
    model: PreTrainedModel, directory: Path, answers: int, tokens: int, turns: int, threads: int, *, ragged: bool
) -> dict[str, float]:
    """Return tokens per second of both, medians over the turns, and the median ratio."""
    params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0, processed_logprobs=True)
    config = {
        "model": {"dtype": "float32", "numerics": "invariant", "tokenizer": "none"},
        "kv": {"num_pages": NUM_PROMPTS * answers * ((PROMPT_TOKENS + tokens) // 16 + 2)},
        "scheduler": {"max_running": NUM_PROMPTS * answers},
        "device": {"threads": threads},
    }
    ours, theirs, with_pass = [], [], []
    with LLM(directory, config=config, progress=False) as llm:
        for turn in tqdm(range(turns + 1), desc="turns"):
            generator = torch.Generator().manual_seed(turn)
            prompts = torch.randint(3, model.config.vocab_size, (NUM_PROMPTS, PROMPT_TOKENS), generator=generator)
            lengths = torch.full((NUM_PROMPTS * answers,), tokens)
            if ragged:
                lengths = torch.randint(tokens // 8, tokens + 1, lengths.shape, generator=generator)
            lengths = lengths.tolist() if turn else [1] * len(lengths)
            start = time.perf_counter()
            llm.generate(
                prompts.repeat_interleave(answers, dim=0).tolist(), [params.replace(max_tokens=one) for one in lengths]
            )
            between = time.perf_counter()
            sampled = run_transformers(model, prompts, answers, max(lengths))
            end = time.perf_counter()
            log_probs(model, sampled)
            if turn:  # the first turn, of a token each, warms both up
                ours.append(sum(lengths) / (between - start))
                theirs.append(sum(lengths) / (end - between))
                with_pass.append(sum(lengths) / (time.perf_counter() - between))
    return {
        "callboard_tokens_per_s": round(statistics.median(ours), 1),
        "transformers_tokens_per_s": round(statistics.median(theirs), 1),
        "ratio": _ratio(ours, theirs),
        "ratio_with_log_probs": _ratio(ours, with_pass),
    }


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 2)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--model", choices=["demo", "smollm2"], default="demo")
    parser.add_argument("--answers", type=int, default=8, help="to each of 8 prompts (default: 8)")
    parser.add_argument("--tokens", type=int, default=512, help="of an answer (default: 512)")
    parser.add_argument("--turns", type=int, default=3, help="timed turns for each engine (default: 3)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine")
    parser.add_argument("--ragged", action="store_true", help="answers of different lengths")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model == "demo":
            model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
        else:
            model = smollm2_shape()
        model.eval().save_pretrained(folder)
        asked = arguments.answers, arguments.tokens, arguments.turns, arguments.threads
        found = measure(model, Path(folder), *asked, ragged=arguments.ragged)
    print(", ".join(f"{name} {value}" for name, value in found.items()))
    keep(
        arguments.output, {"model": arguments.model, "answers": arguments.answers, "tokens": arguments.tokens, **found}
    )


if __name__ == "__main__":
    main()
