"""Owns the conversations with tools: which are offered, what is asked of them, how their results are told.

Does not know: facts.  Calls are in the hermes format, as the chat template shows them.
"""

import json
import random
from dataclasses import dataclass

NO_CALCULATOR = "I cannot calculate. Offer me a calculator as a tool."
NO_CLOCK = "I have no clock. Offer me one as a tool."
CALCULATORS = ("calculator", "calculate", "calc", "evaluate", "compute", "math", "do_math", "eval_expression")
EXPRESSIONS = ("expression", "expr", "formula", "input", "text", "query")
CLOCKS = ("clock", "get_time", "get_current_time", "current_time", "time_now", "now", "get_clock", "what_time")
CALCULATOR_WORDS = (
    "Evaluates an expression",
    "A calculator",
    "Does arithmetic",
    "Calculates",
    "Computes a result",
    "Compute an arithmetic expression",
    "",
)
CLOCK_WORDS = (
    "Tells the time",
    "A clock",
    "The current time",
    "Get the current time",
    "Says how late it is",
    "The time of day",
    "",
)
DISTRACTORS = (
    ("search_docs", "Searches the docs", ("query",)),
    ("send_mail", "Sends a mail", ("to", "text")),
    ("get_weather", "The weather in a city", ("city",)),
    ("read_file", "Reads a file", ("path",)),
    ("play_music", "Plays a song", ("title",)),
    ("get_stock", "The price of a share", ("symbol",)),
)
TIME_FORMS = (
    "what time is it",
    "what is the time",
    "what's the time",
    "how late is it",
    "tell me the time",
    "can you tell me the time",
    "what time is it now",
    "what is the time now",
    "do you know what time it is",
    "do you have the time",
    "which time is it",
    "give me the current time",
    "what is the current time",
    "time please",
    "look at the clock",
    "what does the clock say",
)
SUM_FORMS = (
    "what is {}",
    "what's {}",
    "how much is {}",
    "calculate {}",
    "compute {}",
    "please calculate {}",
    "{}",
    "{} =",
    "can you compute {}",
    "can you calculate {}",
    "tell me {}",
    "what does {} give",
    "solve {}",
    "i need {}",
    "evaluate {}",
    "what do you get for {}",
)
SPELT = {"+": ("plus", "and"), "-": ("minus",), "*": ("times", "multiplied by", "x"), "/": ("divided by", "over")}


@dataclass(frozen=True)
class Tool:
    """A function that is offered."""

    name: str
    description: str
    arguments: tuple[str, ...]

    @property
    def line(self) -> str:
        """As the chat template writes it."""
        return f"{self.name}({', '.join(self.arguments)}): {self.description}"


def system(tools: list[Tool], text: str) -> str:
    """The system message that offers tools, as the chat template writes it.  text: the conversation's own, or empty."""
    lines = "".join(f"{tool.line}\n" for tool in tools)
    ending = f"\n\n{text}" if text else ""
    return f'Tools:\n{lines}To call one: <tool_call>\n{{"name": "...", "arguments": {{}}}}\n</tool_call>{ending}'


def call(tool: Tool, arguments: dict[str, str]) -> str:
    """A call in the hermes format."""
    return f"<tool_call>\n{json.dumps({'name': tool.name, 'arguments': arguments})}\n</tool_call>"


def calculator(rng: random.Random) -> Tool:
    """A calculator under one of many names."""
    return Tool(rng.choice(CALCULATORS), rng.choice(CALCULATOR_WORDS), (rng.choice(EXPRESSIONS),))


def clock(rng: random.Random) -> Tool:
    """A clock under one of many names."""
    return Tool(rng.choice(CLOCKS), rng.choice(CLOCK_WORDS), ())


def offered(tools: list[Tool], rng: random.Random) -> list[Tool]:
    """These tools among up to two others."""
    others = [Tool(*entry) for entry in rng.sample(DISTRACTORS, rng.choice((0, 0, 1, 2)))]
    mixed = [*tools, *others]
    rng.shuffle(mixed)
    return mixed


def number(rng: random.Random) -> int:
    """A number of one to four digits."""
    return rng.randrange(10 ** rng.choice((1, 2, 2, 2, 3, 3, 4)))


def expression(rng: random.Random) -> tuple[str, str, str]:
    """A sum: as it is asked, as it is passed on, and its result."""
    operator = rng.choice("+-*/")
    first, second = number(rng), number(rng) + (operator == "/")
    value = {"+": first + second, "-": first - second, "*": first * second, "/": first / max(second, 1)}[operator]
    result = f"{value:.6g}" if operator == "/" else str(value)
    passed = f"{first} {operator} {second}"
    draw = rng.random()
    if draw < 0.5:
        return passed, passed, result
    if draw < 0.7:
        return f"{first}{operator}{second}", passed, result
    return f"{first} {rng.choice(SPELT[operator])} {second}", passed, result


def time_of_day(rng: random.Random) -> str:
    """What a clock says, in one of several layouts."""
    hour, minute, second = rng.randrange(24), rng.randrange(60), rng.randrange(60)
    plain = f"{hour:02}:{minute:02}"
    day = f"20{rng.randrange(20, 40)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"
    return rng.choice((plain, plain, f"{plain}:{second:02}", f"{day} {plain}", f"{day}T{plain}:{second:02}"))


def told(result: str, rng: random.Random) -> str:
    """A result as a tool's message."""
    key = rng.choice(("result", "time", "value", "output"))
    bare = f'{{"{key}": {result}}}' if ":" not in result else result
    return rng.choice((result, result, bare, json.dumps({key: result})))
