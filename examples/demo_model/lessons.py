"""Owns conversations as tokens: which of them the model learns, and batches of about equal lengths.

Does not know: what is said.  A batch begins each conversation at position 0 and fills it up behind its end, so nothing
in it reads anything of another one, and no mask is needed.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from talks import Talks, Turns
from tokenizers import Tokenizer

POOL = 1024
"""Conversations that are sorted by length together."""
IGNORED = -100
CUT_SHARE = 0.7
CUT_AFTER = 10
"""How many conversations end after so many tokens of their last answer: these decide which answer it is, and what
follows them is soon known by heart."""


@dataclass(frozen=True)
class Lesson:
    """ids: tokens of a conversation.  taught: whether each of them is the assistant's."""

    ids: list[int]
    taught: list[bool]

    def cut(self) -> "Lesson":
        """Without most of the last answer."""
        last = len(self.ids) - 1 - self.taught[::-1].index(True)
        first = last
        while self.taught[first - 1]:
            first -= 1
        end = min(first + CUT_AFTER, last + 1)
        return Lesson(self.ids[:end], self.taught[:end])


def encode(tokenizer: Tokenizer, turns: Turns) -> Lesson:
    """The conversation as the chat template renders it; what the assistant says is taught, its end included."""
    ids: list[int] = []
    taught: list[bool] = []
    for role, content in turns:
        header = tokenizer.encode(f"<|im_start|>{role}\n").ids
        said = tokenizer.encode(f"<|im_start|>{role}\n{content}<|im_end|>").ids[len(header) :]
        end = tokenizer.encode("\n").ids
        ids += [*header, *said, *end]
        taught += [False] * len(header) + [role == "assistant"] * len(said) + [False] * len(end)
    return Lesson(ids, taught)


def collate(lessons: list[Lesson]) -> tuple[torch.Tensor, torch.Tensor]:
    """inputs (N, T) and targets (N, T), int64; targets that are not taught are IGNORED."""
    longest = max(len(lesson.ids) for lesson in lessons)
    tokens = np.zeros((len(lessons), longest), dtype=np.int64)
    targets = np.full((len(lessons), longest), IGNORED, dtype=np.int64)
    for row, lesson in enumerate(lessons):
        count = len(lesson.ids)
        tokens[row, :count] = lesson.ids
        targets[row, :count] = np.where(lesson.taught, lesson.ids, IGNORED)
    return torch.from_numpy(tokens[:, :-1]), torch.from_numpy(targets[:, 1:])


def batches(
    tokenizer: Tokenizer, talks: Talks, size: int, rng: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of at most `size` tokens, fillings counted, for ever."""
    while True:
        drawn = (encode(tokenizer, talks.next()) for _ in range(POOL))
        cut = (lesson.cut() if rng.random() < CUT_SHARE else lesson for lesson in drawn)
        pool = sorted(cut, key=lambda lesson: len(lesson.ids))
        groups: list[list[Lesson]] = [[]]
        for lesson in pool:
            if (len(groups[-1]) + 1) * len(lesson.ids) > size:
                groups.append([])
            groups[-1].append(lesson)
        rng.shuffle(groups)
        for group in groups:
            if group:
                yield collate(group)
