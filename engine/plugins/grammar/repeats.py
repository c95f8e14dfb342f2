"""Repetitions that a grammar requires, counted before a library compiles it.

Owns: counts in expressions, Lark and JSON Schema, multiplied when nested.
Does not know: any library.  The time is linear in the text, for any content.

It counts what every output certainly contains: the least of several alternatives, nothing for optional parts.  Other
parts count as one, such as a rule by its name, a ``$ref`` or the items of an array: too high a count would refuse a
grammar that works, and too low a count leaves the refusal to the library.
"""

import re
from typing import Any, Final

ENOUGH: Final = 1 << 60
# An unclosed group matches to the end, so that no character is read twice.
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
    """Return the most repetitions of anything in every text that a regular expression matches."""
    return 1 if re.search(r"\(\?\w*x", source) else _most(_EXPRESSION, source)


def of_lark(source: str) -> int:
    """Return the most repetitions of anything in every text that Lark's start rule matches."""
    start = _START.search(source)
    return _most(_RULE, source[start.end() :]) if start else 1


def of_schema(schema: Any) -> int:
    """Return the most repetitions of anything in the strings that a JSON Schema requires."""
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
    least, most = ENOUGH, 1  # of the complete alternatives, and of the present one so far
    last = 1  # of the last item, which a count multiplies
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
