"""Owns questions of all the world, which the demo model is taught to refuse: data/others.toml.

Does not know: facts.  Some subjects are never seen in training, by the same rule as forms of facts.
"""

import random
import tomllib
from pathlib import Path

from forms import DO_FORMS, TERM_FORMS, is_held_out

OTHERS = Path(__file__).resolve().parent / "data" / "others.toml"
GAPS = ("country", "person", "word", "language")


class Others:
    """Draws such questions."""

    def __init__(self, rng: random.Random) -> None:
        """Read them, and keep some apart."""
        self._rng = rng
        self._lists: dict[str, list[str]] = tomllib.loads(OTHERS.read_text())
        self._subjects = [subject for subject in self._lists["subjects"] if not is_held_out(subject)]
        self._tasks = [task for task in self._lists["tasks"] if not is_held_out(task)]

    def form(self) -> str:
        """A question to be refused, about what training may see."""
        rng = self._rng
        draw = rng.random()
        if draw < 0.4:
            subject = rng.choice(self._subjects) if rng.random() < 0.75 else self._invented()
            return rng.choice(TERM_FORMS).format(subject)
        if draw < 0.6:
            return rng.choice(DO_FORMS).format(rng.choice(self._tasks))
        gaps = {gap: rng.choice(self._lists[gap]) for gap in GAPS}
        return rng.choice(self._lists["asides"]).format(subject=rng.choice(self._subjects), **gaps)

    def held_out(self) -> list[str]:
        """Questions about subjects that training never sees, three of each."""
        subjects = [subject for subject in self._lists["subjects"] if is_held_out(subject)]
        tasks = [task for task in self._lists["tasks"] if is_held_out(task)]
        # The shortest forms are left out: a single word asks for nothing.
        forms = [form.format(subject) for subject in subjects for form in self._rng.sample(TERM_FORMS[:-2], 3)]
        return forms + [form.format(task) for task in tasks for form in self._rng.sample(DO_FORMS[:-1], 3)]

    def _invented(self) -> str:
        """A word that is none."""
        rng = self._rng
        word = "".join(rng.choice(self._lists["syllables"]) for _ in range(rng.randint(2, 4)))
        return rng.choice(("", "", "a ", "the ")) + word
