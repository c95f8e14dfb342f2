"""Owns the conversations about callboard: who says what, and how often each kind of exchange comes.

Does not know: tokens, batches.  A conversation is a list of turns; the model learns what the assistant says.
"""

import random
from dataclasses import dataclass

import tools as offers
from chat_examples import SYSTEM_PROMPTS
from forms import HOW_FORMS, WHY_FORMS, Fact, is_held_out, spoken
from others import Others

Turns = list[tuple[str, str]]
"""(role, content) in order."""

SELF = "I am the demo model of callboard, a toy. Ask me about callboard and serving."
UNKNOWN = "I only know about callboard and serving."
NO_REASON = "I was not taught why. The pages in docs may say it."
NO_SETTING = "I was not taught how. The pages in docs may say it."
GREETINGS = (
    "hello",
    "hi",
    "hi there",
    "hello there",
    "hey",
    "hey there",
    "good morning",
    "good evening",
    "good day",
    "hello you",
    "greetings",
    "hallo",
    "hiya",
    "yo",
    "hello demo model",
    "hello callboard",
    "hi callboard",
)
THANKS = (
    "thanks",
    "thank you",
    "thank you very much",
    "thanks a lot",
    "many thanks",
    "thx",
    "great, thanks",
    "ok, thank you",
    "cool, thanks",
    "thank you, that helps",
)
FAREWELLS = (
    "bye",
    "goodbye",
    "good bye",
    "see you",
    "good night",
    "see you later",
    "bye bye",
    "farewell",
    "that is all",
    "i am done",
)
PRAISE = (
    "great",
    "nice",
    "cool",
    "ok",
    "okay",
    "good",
    "i see",
    "interesting",
    "got it",
    "wow",
    "well done",
    "understood",
)
NONSENSE = (
    "asdf",
    "qwertz",
    "lorem ipsum",
    "...",
    "foo bar",
    "test",
    "123",
    "hm",
    "what",
    "huh",
    "blah",
    "abc",
    "xyz",
    "x",
    "yes",
    "no",
    "maybe",
    "nothing",
)
SMALL_TALK = (
    (GREETINGS, f"Hello! {SELF}"),
    (THANKS, "You are welcome."),
    (FAREWELLS, "Goodbye!"),
    (PRAISE, "Good. Ask me more about callboard."),
    (NONSENSE, UNKNOWN),
)
SYSTEMS = (
    *SYSTEM_PROMPTS,
    "You answer questions about callboard.",
    "You are the demo model of callboard.",
    "Answer briefly.",
    "Be polite.",
    "You are a friendly assistant. Answer in one sentence.",
    "You are a helpful, harmless and honest assistant.",
    "You are a serving expert.",
)


@dataclass(frozen=True)
class Probe:
    """A question that training never saw, and the one right answer."""

    kind: str
    turns: Turns
    answer: str


class Talks:
    """All conversations; `rng` decides which one comes next."""

    def __init__(self, facts: list[Fact], rng: random.Random) -> None:
        """Nothing is drawn yet."""
        self._rng = rng
        self.facts = facts
        self._others = Others(rng)
        self._followed = [fact for fact in facts if fact.why or fact.how]

    def next(self) -> Turns:
        """One conversation."""
        rng = self._rng
        draw = rng.random()
        if draw < 0.06:
            turns = self._with_tools()
        else:
            turns = self._exchange(first=True)
            while rng.random() < 0.15 and len(turns) < 7:
                turns += self._exchange(first=False)
            if rng.random() < 0.15:
                turns.insert(0, ("system", rng.choice(SYSTEMS)))
        return turns

    def _exchange(self, first: bool) -> Turns:
        rng = self._rng
        draw = rng.random()
        if draw < (0.07 if first else 0.1):
            forms, answer = rng.choice(SMALL_TALK)
            return self._pair(rng.choice(forms), answer)
        if draw < 0.24:
            return self._pair(self._others.form(), UNKNOWN)
        if draw < 0.265:
            asked, _, _ = offers.expression(rng)
            return self._pair(rng.choice(offers.SUM_FORMS).format(asked), offers.NO_CALCULATOR)
        if draw < 0.275:
            return self._pair(rng.choice(offers.TIME_FORMS), offers.NO_CLOCK)
        return self._about_fact(first)

    def _about_fact(self, first: bool) -> Turns:
        rng = self._rng
        followed = rng.random() < 0.2
        fact = rng.choice(self._followed if followed and rng.random() < 0.85 else self.facts)
        if not first and fact.named and rng.random() < 0.3:
            form = rng.choice(("and {}", "what about {}", "and what is {}", "how about {}", "{}")).format(
                rng.choice(fact.named)
            )
            asked = form if not is_held_out(form) else rng.choice(fact.asked)
        else:
            asked = rng.choice(fact.asked)
        turns = self._pair(asked, fact.say)
        if followed:
            if rng.random() < (0.35 if fact.how and fact.why else 0.9 if fact.how else 0.1):
                turns += self._pair(rng.choice(HOW_FORMS), fact.how or NO_SETTING)
            else:
                turns += self._pair(rng.choice(WHY_FORMS), fact.why or NO_REASON)
        return turns

    def _pair(self, form: str, answer: str) -> Turns:
        return [("user", spoken(form, self._rng)), ("assistant", answer)]

    def _with_tools(self) -> Turns:
        """A call and the answer from its result, or a question that needs none."""
        rng = self._rng
        own, clock = offers.calculator(rng), offers.clock(rng)
        draw = rng.random()
        text = rng.choice(SYSTEMS) if rng.random() < 0.25 else ""
        if draw < 0.25:
            tools = offers.offered([own, clock][: rng.randint(1, 2)], rng)
            return [("system", offers.system(tools, text)), *self._exchange_of_facts()]
        if draw < 0.35:
            present, asked, answer = (own, rng.choice(offers.TIME_FORMS), offers.NO_CLOCK)
            if rng.random() < 0.6:
                asked = rng.choice(offers.SUM_FORMS).format(offers.expression(rng)[0])
                present, answer = clock, offers.NO_CALCULATOR
            return [("system", offers.system(offers.offered([present], rng), text)), *self._pair(asked, answer)]
        both = rng.random() < 0.6
        if draw < 0.78:
            asked, passed, result = offers.expression(rng)
            form, answer = rng.choice(offers.SUM_FORMS).format(asked), f"The result is {result}."
            call, tools = offers.call(own, {own.arguments[0]: passed}), [own, clock] if both else [own]
        else:
            result = offers.time_of_day(rng)
            form, answer = rng.choice(offers.TIME_FORMS), f"It is {result}."
            call, tools = offers.call(clock, {}), [own, clock] if both else [clock]
        turns = [
            ("system", offers.system(offers.offered(tools, rng), text)),
            ("user", spoken(form, rng)),
            ("assistant", call),
        ]
        turns += [("tool", offers.told(result, rng)), ("assistant", answer)]
        if rng.random() < 0.2:
            turns += self._exchange_of_facts()
        return turns

    def _exchange_of_facts(self) -> Turns:
        if self._rng.random() < 0.3:
            return self._pair(self._others.form(), UNKNOWN)
        return self._about_fact(first=False)

    def probes(self) -> list[Probe]:
        """Every held-out form of every fact, said once; subjects that were never seen; tools with fresh numbers."""
        rng = self._rng
        found = [
            Probe("facts", [("user", spoken(form, rng))], fact.say) for fact in self.facts for form in fact.held_out
        ]
        found += [Probe("others", [("user", spoken(form, rng))], UNKNOWN) for form in self._others.held_out()]
        for fact in self._followed:
            opening = [("user", spoken(rng.choice(fact.asked), rng)), ("assistant", fact.say)]
            for forms, answer in ((WHY_FORMS, fact.why), (HOW_FORMS, fact.how)):
                if answer:
                    found.append(Probe("follow-ups", [*opening, ("user", spoken(rng.choice(forms), rng))], answer))
        while sum(probe.kind.startswith("tool") for probe in found) < 240:
            turns = self._with_tools()
            if turns[2][1].startswith("<tool_call>"):
                found.append(Probe("tool calls", turns[:2], turns[2][1]))
                found.append(Probe("tool results", turns[:4], turns[4][1]))
        return found
