"""Owns the examination: how many questions that training never saw get exactly the right answer.

Does not know: training.  Greedy decoding writes the right answer exactly if each of its tokens, its end included, is
the likeliest one behind the right ones before it, so one pass over question and answer decides.
"""

import tomllib
from collections import Counter
from pathlib import Path

import torch
from lessons import IGNORED, collate, encode
from talks import UNKNOWN, Probe, Talks
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

BATCH = 64
OWN_WORDS = Path(__file__).resolve().parent / "data" / "examination.toml"


def examination(talks: Talks) -> list[Probe]:
    """Everything that is asked: held-out forms, and questions in words of our own."""
    answers = [UNKNOWN, *(fact.say for fact in talks.facts)]
    own = []
    for question, beginning in tomllib.loads(OWN_WORDS.read_text()).items():
        (answer,) = (answer for answer in answers if answer.startswith(beginning))
        own.append(Probe("own words", [("user", question)], answer))
    return [*own, *talks.probes()]


@torch.inference_mode()
def passed(model: Qwen3ForCausalLM, tokenizer: Tokenizer, probes: list[Probe]) -> list[bool]:
    """For each probe whether its greedy answer is the right one, character by character."""
    device = next(model.parameters()).device
    lessons = [encode(tokenizer, [*probe.turns, ("assistant", probe.answer)]) for probe in probes]
    for lesson in lessons:  # only the last turn is examined
        end = len(lesson.taught) - 1
        while lesson.taught[end - 1]:
            end -= 1
        lesson.taught[:end] = [False] * end
    order = sorted(range(len(probes)), key=lambda index: len(lessons[index].ids))
    results = [False] * len(probes)
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        inputs, targets = collate([lessons[index] for index in chosen])
        likeliest = model(input_ids=inputs.to(device), use_cache=False).logits.argmax(-1).cpu()
        right = ((likeliest == targets) | (targets == IGNORED)).all(-1)
        for index, good in zip(chosen, right.tolist(), strict=True):
            results[index] = good
    return results


def marks(probes: list[Probe], results: list[bool]) -> dict[str, tuple[int, int]]:
    """Kind -> (right answers, questions)."""
    asked = Counter(probe.kind for probe in probes)
    right = Counter(probe.kind for probe, good in zip(probes, results, strict=True) if good)
    return {kind: (right[kind], count) for kind, count in asked.items()}
