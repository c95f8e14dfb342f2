"""How often a grammar demands that something is repeated, counted before a library compiles it.

Owns: the counts as expressions, Lark and JSON Schema write them, multiplied where they are nested.
Does not know: any library.  Linear in the text, whatever it holds.

Counts what every output plainly contains: of alternatives the least, of what may be left out nothing.  What is not
plain counts as one thing, such as a rule by its name, a ``$ref`` or the items of an array: a count that is too high
would refuse a grammar that works, and one that is too low leaves the refusal to the library.
"""

import re
from typing import Any, Final

ENOUGH: Final = 1 << 60
# What is left open goes on to the end, so that no character is looked at twice.
_COUNT: Final = r"\{ {0,8}(?P<times>\d+) {0,8}(?:, {0,8}\d* {0,8})?\}"
_CLASS: Final = r"\[\^?\]?(?:\\.|\[(?:\\.|[^\]\\])*\]?|[^\[\]\\])*\]?"  # may hold another class
_EXPRESSION: Final = re.compile(rf"(?s)\\[xuUpP]\{{[^}}]*\}}?|\\.|{_CLASS}|{_COUNT}|.")
_START: Final = re.compile(r"(?m)^[ \t]*[?!]?start\b[^:\n]*:")
_RULE: Final = re.compile(
    rf"""(?sxm) "(?:\\.|[^"\\])*"?i? | (?P<space>\s+|(?://|\#)[^\n]*) | /(?P<expression>(?:\\.|[^/\\\n])+)/?
    | {_COUNT.replace(" ", "[ ]")} | ~\s?(?P<times_in_lark>\d+)(?:\.\.\d+)? | (?P<end>:|^%(?:ignore|import)\b)
    | (?P<unclear>[~%\[]) | \w+ | ."""
)


def of_expression(source: str) -> int:
    """The most that a regular expression repeats something in every text that it matches."""
    return 1 if re.search(r"\(\?\w*x", source) else _most(_EXPRESSION, source)


def of_lark(source: str) -> int:
    """The most that the rule where Lark starts repeats something in every text that it matches."""
    start = _START.search(source)
    return _most(_RULE, source[start.end() :]) if start else 1


def of_schema(schema: Any) -> int:
    """The most that the strings which a JSON Schema demands repeat something."""
    if not isinstance(schema, dict):
        return 1
    found = [1]
    if schema.get("type") == "string":
        if isinstance(least := schema.get("minLength"), int | float):
            found.append(int(min(ENOUGH, least)))
        if isinstance(pattern := schema.get("pattern"), str):
            found.append(of_expression(pattern))
    if schema.get("type") == "object":
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, dict) and isinstance(required, list):
            found += [of_schema(inner) for name, inner in properties.items() if name in required]
    for name in ("anyOf", "oneOf"):
        if isinstance(others := schema.get(name), list):
            found.append(min(map(of_schema, others), default=1))
    return max(found)


def _most(tokens: re.Pattern[str], source: str) -> int:
    groups: list[tuple[int, int]] = []  # (least, most) of the groups around this one
    least, most = ENOUGH, 1  # of its complete alternatives, and of this alternative so far
    last = 1  # of the item that came last, which a count multiplies
    for token in tokens.finditer(source):
        found, text = token.groupdict(), token.group()
        if found.get("space"):
            continue
        if found.get("unclear"):
            return 1
        if found.get("end"):
            break
        if times := found["times"] or found.get("times_in_lark"):
            last = min(ENOUGH, last * int(times[:18])) or 1
        elif text in ("*", "?"):
            last = 1
        elif text == "(":
            groups.append((least, max(most, last)))
            least, most, last = ENOUGH, 1, 1
        elif text == ")" and groups:
            last = min(least, max(most, last))
            least, most = groups.pop()
        elif text == "|":
            least, most, last = min(least, max(most, last)), 1, 1
        elif text != "+":
            most = max(most, last)
            last = of_expression(found["expression"]) if found.get("expression") else 1
    return 1 if groups else min(least, max(most, last))
