"""The conformance kit for parsers: one call checks a parser, and lists every case that fails.

    from engine.plugins.testing.parsers import check_tool_parser
    check_tool_parser(HermesFormat, write=lambda calls: "\\n".join(map(written, calls)))

Owns: generated outputs, and the rule that an output in any pieces gives the same as the whole.
Does not know: torch, any format; the author supplies what a model writes.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, cast

import msgspec

from engine.plugins.proof.findings import Findings
from engine.text.reasoning import ReasoningFormat, Thinking
from engine.text.tool_calls import CallPiece, OutputPart, ToolFormat, ToolParser
from engine.text.tool_format import CallShape, CallsShape, Tool

Call = tuple[str, dict[str, Any]]  # a function's name and its arguments
# A parser's result for an output: the text, (name, arguments as written) of each call, and ``cut_off``.
Read = tuple[str, list[tuple[str, str]], bool]

_PROPERTIES: Final = {
    "text": {"type": "string"}, "count": {"type": "integer"}, "share": {"type": "number"}, "flag": {"type": "boolean"},
    "list": {"type": "array"}, "table": {"type": "object"}, "either": {"type": ["string", "null"]},
}  # fmt: skip
TOOLS: Final = tuple(
    Tool(name, {"type": "object", "properties": dict(_PROPERTIES)}) for name in ("f", "get_weather", "find-2")
)
_WORDS: Final = (
    "Sure",
    "a < b",
    "x > 3",
    "{1}",
    "[2]",
    "é",
    "日本",
    "🙂",
    "function",
    "json",
    "```",
    '"',
    "'",
    "\\",
    "=",
)
_THOUGHTS: Final[tuple[Thinking, ...]] = ("open", "optional")


def check_tool_parser(
    make: Callable[[], ToolFormat],
    write: Callable[[Sequence[Call]], str],
    *,
    alone: bool = False,
    escapes: bool = True,
    num_outputs: int = 300,
    seed: int = 0,
) -> None:
    """Parse outputs with calls, text and both; cut off, damaged, and cut into pieces.  Raises ConformanceError.

    make: builds the format, as the plugin's hook does.  write: returns a model's text for one or more calls.
    alone: calls are the whole output.  escapes: strings may contain the format's markers."""
    findings = Findings("tool parser")
    form = make()
    rng = random.Random(seed)
    values = _Values(rng, (*form.markers, *_WORDS) if escapes else _WORDS)
    outputs = _Outputs(rng, values, write, alone=alone)
    with findings.case("calls are parsed as they were written"):
        for text, expected, calls in outputs.whole(num_outputs):
            _check_calls(_read(form, [text]), text, expected, calls)
    with findings.case("any way of cutting gives the same as the whole"):
        for text, _, _ in outputs.whole(num_outputs):
            _check_cuts(form, rng, text)
    with findings.case("an output that is cut off"):
        for text, _, _ in outputs.whole(num_outputs):
            _check_cut_off(form, rng, text)
    with findings.case("damaged outputs, cut in any way"):
        for text in outputs.damaged(num_outputs, form.markers):
            _check_cuts(form, rng, text)
    with findings.case("text without calls is text"):
        for _ in range(num_outputs):
            text = values.text().replace("[", "(")
            found = _read(form, [text])
            assert found == (text, [], False), f"{text!r} became {found!r}"
    with findings.case("text that ends like the beginning of a call is text"):
        for marker in form.markers:
            text = f"Sure {marker[: rng.randrange(1, len(marker))]}"
            assert _read(form, [text]) == (text, [], False), f"{text!r} became {_read(form, [text])!r}"
    with findings.case("parsers do not share state"):
        _check_apart(form, [text for text, _, _ in outputs.whole(2)])
    if form.constrains:
        with findings.case("outputs of its grammar are parsed"):
            _check_grammar(form, values, num_outputs)
    findings.conclude()


def check_reasoning_parser(
    make: Callable[[], ReasoningFormat], write: Callable[[str, str], str], *, num_outputs: int = 300, seed: int = 0
) -> None:
    """Parse outputs with thoughts and an answer; cut off, damaged, and cut into pieces.  Raises ConformanceError.

    make: builds the format, as the plugin's hook does.  write: returns a model's text for (thoughts, answer)."""
    findings = Findings("reasoning parser")
    form = make()
    rng = random.Random(seed)
    values = _Values(rng, _WORDS)
    pairs = [(values.text().strip() or "so", values.text().strip() or "yes") for _ in range(num_outputs)]
    with findings.case("thoughts and answers are separated"):
        for thoughts, answer in pairs:
            found = _split(form, "optional", [write(thoughts, answer)])
            assert tuple(map(str.strip, found)) == (thoughts, answer), f"{write(thoughts, answer)!r} became {found!r}"
    for thinking in _THOUGHTS:
        with findings.case(f"any way of cutting gives the same as the whole, {thinking}"):
            for thoughts, answer in pairs:
                whole = write(thoughts, answer)
                for text in (whole, whole[: rng.randrange(len(whole))], _damaged(rng, whole, form.markers)):
                    expected = _split(form, thinking, [text])
                    for pieces in _cuts(rng, text):
                        found = _split(form, thinking, pieces)
                        assert found == expected, f"{pieces!r:.300} became {found!r}, and in one piece {expected!r}"
    with findings.case("an output that is cut off returns no thought as answer"):
        for thoughts, answer in pairs:
            whole = write(thoughts, answer)
            before, behind = _split(form, "optional", [whole[: rng.randrange(len(whole))]])
            assert not behind or thoughts.startswith(before.strip()), f"{behind!r} of {whole!r}"
    findings.conclude()


# ---- what is generated ---------------------------------------------------------------------------


class _Values:
    """Draws texts and arguments.  scraps: the parts of strings."""

    def __init__(self, rng: random.Random, scraps: Sequence[str]) -> None:
        self._rng = rng
        self._scraps = scraps

    def text(self, scraps: Sequence[str] = _WORDS) -> str:
        rng = self._rng
        return "".join(rng.choice(scraps) + rng.choice(("", " ", "\n")) for _ in range(rng.randrange(8)))

    def arguments(self) -> dict[str, Any]:
        rng = self._rng
        drawn: dict[str, Callable[[], Any]] = {
            "text": lambda: self.text(self._scraps),
            "count": lambda: rng.randrange(-5, 1 << 40),
            "share": lambda: rng.choice((0.5, -1e-9, 3)),
            "flag": lambda: rng.random() < 0.5,
            "list": lambda: [self._nested(2) for _ in range(rng.randrange(3))],
            "table": lambda: {self.text(self._scraps): self._nested(2) for _ in range(rng.randrange(3))},
            "either": lambda: rng.choice((None, "null and void", "a")),
        }
        names = rng.sample(sorted(drawn), rng.randrange(4))
        return {name: drawn[name]() for name in names}

    def call(self) -> Call:
        return self._rng.choice(TOOLS).name, self.arguments()

    def _nested(self, depth: int) -> Any:
        kind = self._rng.randrange(5 if depth else 3)
        if kind == 0:
            return self.text(self._scraps)
        if kind == 1:
            return self._rng.randrange(100)
        if kind == 2:
            return self._rng.choice((None, True, False))
        if kind == 3:
            return [self._nested(depth - 1) for _ in range(self._rng.randrange(3))]
        return {self.text(self._scraps): self._nested(depth - 1) for _ in range(self._rng.randrange(3))}


class _Outputs:
    """Draws outputs of a model."""

    def __init__(
        self, rng: random.Random, values: _Values, write: Callable[[Sequence[Call]], str], *, alone: bool
    ) -> None:
        self._rng = rng
        self._values = values
        self._write = write
        self._alone = alone

    def whole(self, number: int) -> Iterator[tuple[str, str, list[Call]]]:
        """Yield (output, the text in it, the calls in it), with text before, between and after calls where allowed."""
        for _ in range(number):
            texts: list[str] = []
            calls: list[Call] = []
            output = ""
            for _ in range(1 if self._alone else self._rng.randrange(1, 3)):
                text = "" if self._alone else self._values.text()
                some = [self._values.call() for _ in range(self._rng.randrange(1, 4))]
                output += text + self._write(some)
                texts.append(text)
                calls += some
            text = "" if self._alone else self._rng.choice(("", "\n", self._values.text()))
            yield output + text, "".join([*texts, text]), calls

    def damaged(self, number: int, markers: Sequence[str]) -> Iterator[str]:
        """Yield outputs with parts missing, doubled or replaced, mostly by markers and parts of them."""
        for text, _, _ in self.whole(number):
            yield _damaged(self._rng, text, markers)


def _damaged(rng: random.Random, text: str, markers: Sequence[str]) -> str:
    for _ in range(rng.randrange(1, 4)):
        start, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        end = min(end, start + 12)
        marker = rng.choice((*markers, "{", "}", '"', "[", ")", " ", "x"))
        middle = rng.choice(("", text[start:end] * 2, marker, marker[: rng.randrange(len(marker) + 1)]))
        text = text[:start] + middle + text[end:]
    return text


def _cuts(rng: random.Random, text: str) -> Iterator[list[str]]:
    """Yield the text as single characters, and cut at random, with empty pieces too."""
    yield list(text)
    for num_cuts in (1, 4, 16):
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(num_cuts))
        yield [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


# ---- what is checked -----------------------------------------------------------------------------


def _read(form: ToolFormat, pieces: Sequence[str], *, exact: bool = False) -> Read:
    parser = form.parser(TOOLS, exact=exact)
    parts: list[OutputPart] = []
    for piece in pieces:
        parts += parser.push(piece)
    return _joined(parser, parts + parser.finish())


def _joined(parser: ToolParser, parts: Sequence[OutputPart]) -> Read:
    content = ""
    calls: list[tuple[str, str]] = []
    for part in parts:
        if not isinstance(part, CallPiece):
            content += part
            continue
        if part.name is not None:
            assert part.index == len(calls), f"call {len(calls)} has the index {part.index}"
            calls.append((part.name, ""))
        assert part.index == len(calls) - 1, f"a piece of call {part.index} comes after {len(calls)} calls have begun"
        name, arguments = calls[-1]
        calls[-1] = (name, arguments + part.arguments)
    return content, calls, parser.cut_off


def _check_calls(found: Read, text: str, expected: str, calls: Sequence[Call]) -> None:
    content, parsed, cut_off = found
    decoded = [(name, json.loads(arguments)) for name, arguments in parsed]
    assert decoded == list(calls), f"{text!r} became {parsed!r}"
    assert not cut_off, f"{text!r} is complete, but cut_off is True"
    # White space around calls is not text, so it is removed from both.
    assert "".join(content.split()) == "".join(expected.split()), f"the text of {text!r} became {content!r}"


def _check_cuts(form: ToolFormat, rng: random.Random, text: str) -> None:
    expected = _read(form, [text])
    for pieces in _cuts(rng, text):
        found = _read(form, pieces)
        assert found == expected, f"{pieces!r:.300} became {found!r:.200}, and in one piece {expected!r:.200}"


def _check_cut_off(form: ToolFormat, rng: random.Random, text: str) -> None:
    """Check that calls of a cut-off output are the beginning of those of the whole, and half a call is reported."""
    _, whole, _ = _read(form, [text])
    begun = text[: rng.randrange(len(text) + 1)]
    _check_cuts(form, rng, begun)
    _, calls, cut_off = _read(form, [begun])
    for index, (name, arguments) in enumerate(calls):
        assert [name] == [one for one, _ in whole[index : index + 1]], f"{begun!r} calls {name}, {text!r} does not"
        assert whole[index][1].startswith(arguments), f"{arguments!r} is not how {whole[index][1]!r} begins"
        if index < len(calls) - 1 or not cut_off:
            assert isinstance(json.loads(arguments), dict), f"{begun!r} has arguments {arguments!r}, not cut off"
    assert calls or not cut_off, f"{begun!r} has no call, but cut_off is True"


def _check_apart(form: ToolFormat, texts: Sequence[str]) -> None:
    parsers = [form.parser(TOOLS, exact=False) for _ in texts]
    parts: list[list[OutputPart]] = [[] for _ in texts]
    for at in range(max(map(len, texts))):
        for parser, text, read in zip(parsers, texts, parts, strict=True):
            read += parser.push(text[at : at + 1])
    for parser, text, read in zip(parsers, texts, parts, strict=True):
        assert _joined(parser, read + parser.finish()) == _read(form, [text]), f"{text!r} next to another output"


def _check_grammar(form: ToolFormat, values: _Values, num_outputs: int) -> None:
    grammar = form.grammar(TOOLS, None, many=True, forced=True)
    shape = msgspec.json.decode(grammar.source, type=CallsShape)
    by_name = {tool.name: call for tool, call in zip(TOOLS, shape.calls, strict=True)}
    for _ in range(num_outputs):
        calls = [values.call() for _ in range(2)]
        written = shape.separator.join(
            by_name[name].begin + _arguments(by_name[name], arguments) + by_name[name].end for name, arguments in calls
        )
        text = written.join(shape.around)
        _check_calls(_read(form, [text], exact=True), text, "", calls)


def _arguments(call: CallShape, arguments: dict[str, Any]) -> str:
    """Return the arguments of a call as its grammar writes them."""
    if call.values is None:
        return json.dumps(arguments, ensure_ascii=False)
    named, written = {value.name: value for value in call.values}, []
    for name, argument in arguments.items():
        is_bare = isinstance(argument, str) and not call.between
        text = argument if is_bare else json.dumps(argument, ensure_ascii=False)
        value = named.get(name) or named[""]
        written.append(value.begin + ("" if value.name else name + value.then) + text + value.end)
    return call.between.join(written)


def _split(form: ReasoningFormat, thinking: Thinking, pieces: Sequence[str]) -> tuple[str, str]:
    parser = form.parser(thinking)
    parts = [parser.push(piece) for piece in pieces] + [parser.finish()]
    thoughts, answer = cast("tuple[list[str], list[str]]", tuple(zip(*parts, strict=True)))
    return "".join(thoughts), "".join(answer)
