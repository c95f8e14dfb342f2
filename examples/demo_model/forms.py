"""Owns the ways of asking: facts.toml as questions, and which of them training never sees.

Does not know: conversations, tokens.  A form is a whole question in lower case, without a mark at its end; `spoken`
says it as people type.  Which forms are held out depends on their text alone, so it is settled before any training.
"""

import hashlib
import random
import re
import tomllib
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

FACTS = Path(__file__).resolve().parent / "data" / "facts.toml"
HELD_OUT_PERCENT = 12
TERM_FORMS = (
    "what is {}",
    "what's {}",
    "whats {}",
    "what is {} in callboard",
    "what does {} mean",
    "what do you mean by {}",
    "what is meant by {}",
    "explain {}",
    "explain {} to me",
    "please explain {}",
    "can you explain {}",
    "could you explain what {} is",
    "define {}",
    "describe {}",
    "tell me about {}",
    "tell me what {} is",
    "what about {}",
    "do you know what {} is",
    "i do not understand {}",
    "i want to know what {} is",
    "give me a definition of {}",
    "what exactly is {}",
    "what is {} good for",
    "{}",
    "how does {} work",
)
DO_FORMS = (
    "how do i {}",
    "how can i {}",
    "how to {}",
    "how do you {}",
    "how would i {}",
    "how does one {}",
    "how do we {}",
    "i want to {}",
    "i would like to {}",
    "i need to {}",
    "tell me how to {}",
    "can you tell me how to {}",
    "show me how to {}",
    "explain how to {}",
    "what do i do to {}",
    "what must i type to {}",
    "what is the way to {}",
    "is there a way to {}",
    "can i {}",
    "what is needed to {}",
    "{}",
)
WHY_TERM_FORMS = (
    "why {}",
    "why is there {}",
    "why do we need {}",
    "why does callboard have {}",
    "why would i want {}",
    "what is the reason for {}",
    "why do you use {}",
)
HOW_TERM_FORMS = (
    "how do i set {}",
    "how do i change {}",
    "how do i configure {}",
    "which setting is for {}",
    "which setting controls {}",
    "where do i set {}",
    "what do i set for {}",
)
WHY_FORMS = (
    "why",
    "and why",
    "why is that",
    "but why",
    "why so",
    "what for",
    "and what for",
    "how come",
    "for what reason",
)
HOW_FORMS = (
    "how do i set that",
    "and how do i set that",
    "how do i change that",
    "how can i change it",
    "which setting is that",
    "how do i set it",
    "and how do i get that",
    "where do i set that",
)
OPENINGS = (
    "hi, ",
    "hello, ",
    "hey, ",
    "please, ",
    "so ",
    "ok, ",
    "and ",
    "well, ",
    "one question: ",
    "now, ",
    "thanks, and ",
)
CLOSINGS = (" please", ", please", " exactly", " then", ", can you tell me", " actually")


@dataclass(frozen=True)
class Fact:
    """One answer, the questions that ask for it, and what may follow.  Empty: nothing follows."""

    say: str
    asked: tuple[str, ...]
    held_out: tuple[str, ...]
    named: tuple[str, ...]
    """Words for it that may stand alone behind another question: "and a page?"."""
    why: str
    how: str


def is_held_out(text: str) -> bool:
    """Whether training never sees this text as a question; a function of the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 100 < HELD_OUT_PERCENT


def expand(pattern: str) -> list[str]:
    """All texts of a pattern: `(a|b)` is either, `( a)` is there or not."""
    parts = re.split(r"\(([^)]*)\)\??", pattern)
    choices = [part.split("|") if "|" in part else [part, ""] for part in parts[1::2]]
    texts = []
    for chosen in product(*choices):
        pieces = [parts[0]]
        for text, rest in zip(chosen, parts[2::2], strict=True):
            pieces += [text, rest]
        texts.append(" ".join("".join(pieces).split()))
    return texts


def read_facts() -> list[Fact]:
    """All facts, each with the forms that ask for it; the reasons and settings of terms are facts of their own."""
    facts = []
    for entry in tomllib.loads(FACTS.read_text())["fact"]:
        terms, tasks = entry.get("terms", []), entry.get("do", [])
        why, how = entry.get("why", ""), entry.get("how", "")
        forms = [form.format(term) for term in terms for form in TERM_FORMS]
        forms += [form.format(task) for task in tasks for form in DO_FORMS]
        forms += [text for pattern in entry.get("ask", []) for text in expand(pattern)]
        facts.append(parted(Fact(entry["say"], tuple(forms), (), tuple(terms), why, how)))
        for say, asking in ((why, WHY_TERM_FORMS), (how, HOW_TERM_FORMS)):
            if say and terms:
                facts.append(
                    parted(Fact(say, tuple(form.format(term) for term in terms for form in asking), (), (), "", ""))
                )
    return facts


def parted(fact: Fact) -> Fact:
    """The fact with its held-out forms apart."""
    held_out = tuple(form for form in dict.fromkeys(fact.asked) if is_held_out(form))
    return replace(fact, asked=tuple(form for form in fact.asked if form not in held_out), held_out=held_out)


def misspelt(text: str, rng: random.Random) -> str:
    """The text with one letter of a longer word left out, doubled, or swapped with the next one."""
    words = list(re.finditer(r"[a-z]{5,}", text))
    if not words:
        return text
    word = rng.choice(words)
    at = rng.randrange(word.start() + 1, word.end() - 1)
    changed = rng.choice((text[at + 1], "", text[at] * 2))
    rest = text[at] + text[at + 2 :] if changed == text[at + 1] else text[at + 1 :]
    return text[:at] + changed + rest


def spoken(form: str, rng: random.Random) -> str:
    """The form as somebody types it: with or without capitals, marks, courtesies and slips."""
    text = form
    if rng.random() < 0.1:
        text = misspelt(text, rng)
    if rng.random() < 0.12:
        text = rng.choice(OPENINGS) + text
    if rng.random() < 0.06:
        text += rng.choice(CLOSINGS)
    draw = rng.random()
    if draw < 0.55:
        text = text[0].upper() + text[1:]
        text = re.sub(r"\bi\b", "I", text)
        text = re.sub(
            r"\b(gpu|gpus|kv|llm|llms|api|cpu|json|itl|ttft|tpot|lru|cuda|http)\b", lambda m: m[0].upper(), text
        )
        text = re.sub(r"\blora\b", "LoRA", text, flags=re.IGNORECASE)
    elif draw < 0.58:
        text = text.upper()
    return text + rng.choice(("?", "?", "?", "", "", ".", "!"))
