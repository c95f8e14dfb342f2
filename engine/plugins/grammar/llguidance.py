"""Grammars by llguidance: JSON Schema, regular expressions, GBNF and Lark, parsed by Earley's algorithm token by token.

Owns: the translation of a grammar to llguidance's Lark, and the limits on its time and memory.
Does not know: requests, devices.

Constraints that a grammar cannot express are checked before an output may end, or refused with their path, and never
ignored; but ``oneOf`` may be treated as ``anyOf``.  No ``$ref`` is fetched.  White space between the tokens of JSON is
bounded, so that no model can write it forever.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import llguidance
import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from engine.plugins.grammar import checks, repeats, schemas
from engine.plugins.grammar.bare import bare_texts
from engine.plugins.grammar.endings import Ending
from engine.plugins.hookspecs import GrammarContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.text.grammar import GrammarFailure, Mask
from engine.text.reasoning import CLOSE, OPEN, Thinking
from engine.text.token_limits import mask_of
from engine.text.tool_format import SPACE, CallShape, CallsShape, Otherwise, TagsShape, ValueShape
from engine.types.errors import RequestError
from engine.types.params import Grammar

CALLBOARD_PLUGIN = {"api": 1, "packages": ["llguidance"]}

_MAX_CHOICES: Final = 4096
_MAX_CALLS: Final = 32
_MAX_NAME_CHARS: Final = 64  # of an argument that no schema names
_MAX_MESSAGE_CHARS: Final = 300
# Between the tokens of JSON: at most one space, or a new line with its indentation.
_WHITE_SPACE: Final = "( |\\n[ \\t]{0,24})?"
# Where only one text can follow, the model still chooses its tokens, as it would unconstrained.
_NO_FORCING: Final = '%llguidance {"no_forcing": true}\n\n'
# Prefixes the name of a special token in llguidance's vocabulary; no text can contain it.
_SPECIAL: Final = b"\xff"
_SLASH: Final = "\\/"  # as required in Lark's expressions
_IN_GRAMMAR: Final = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_PREFIX: Final = "the grammar or schema cannot be used: "
_BASE_BYTES: Final = 64 << 10
_BYTES_PER_CHARACTER: Final = 64


class LLGuidanceOptions(Options, frozen=True):
    """Options of the plugin.

    max_lexer_states: of one grammar, about 2 kB each; a request with more fails.  max_grammar_size: symbols.
    max_items_in_row: ways of parsing the text so far; work grows with them, and a request with more fails.
    coerce_one_of: treat a oneOf whose branches may overlap as anyOf; if false, it is refused."""

    max_lexer_states: int = 20_000
    max_grammar_size: int = 100_000
    max_items_in_row: int = 2_000
    coerce_one_of: bool = True


Branches = list[list[LLMatcher]]


class LLGuidanceMatcher:
    """The state of one output.  branches: the output matches at least one of them, and all matchers of that one.

    Alternatives in one grammar would share its lexer, whose longest match hides shorter ones.
    ending: what is checked before the output may end with one of the tokens of ``ends``; None for nothing.
    """

    def __init__(self, branches: Branches, ends: Mask, ending: Ending | None = None) -> None:
        self._branches = branches
        self._ends = ends
        self._ending = ending

    def consume(self, token_id: int) -> None:
        left = [branch for branch in self._branches if all(matcher.consume_token(token_id) for matcher in branch)]
        if not left:
            error = next(matcher.get_error() for matcher in self._branches[0] if matcher.is_error())
            raise GrammarFailure(_shortened(error))
        self._branches = left
        if self._ending is not None:
            self._ending.consume(token_id)

    def fill(self, mask: Mask) -> None:
        first, *others = self._branches
        _fill_all(first, mask)
        for branch in others:
            mask |= _fill_all(branch, np.empty_like(mask))
        if not mask.any():
            raise GrammarFailure("nothing may follow, not even the end")
        if self._ending is not None and (mask & self._ends).any():
            fault, is_final = self._ending.fault()
            if fault:
                mask &= ~self._ends
            if fault and (is_final or not mask.any()):
                raise GrammarFailure(fault)


class LLGuidanceGrammar:
    """A compiled grammar; its first mask has been computed, since that shows whether it is too large.

    ends, new_ending: for each matcher."""

    def __init__(self, branches: Branches, num_bytes: int, ends: Mask, new_ending: Callable[[], Ending] | None) -> None:
        self._branches = branches
        self._ends = ends
        self._new_ending = new_ending
        self.num_bytes = num_bytes

    def matcher(self) -> LLGuidanceMatcher:
        branches = [[matcher.deep_copy() for matcher in branch] for branch in self._branches]
        return LLGuidanceMatcher(branches, self._ends, self._new_ending and self._new_ending())


class LLGuidance:
    """The engine for one model's vocabulary."""

    def __init__(self, context: GrammarContext) -> None:
        self._vocab_size = context.vocab_size
        self._options = decode_options("grammar.llguidance", context.options, LLGuidanceOptions)
        self._pieces = context.pieces
        ends = list(context.eos_token_ids) or [_unused(context)]
        self._ends = mask_of(ends, -(-context.vocab_size // 32))
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Vocabulary(context)), eos_token=ends)
        special = sorted({context.pieces[token_id] for token_id in context.special_token_ids})
        self._special = {piece.decode() for piece in special if re.fullmatch(rb"<[^<>\s]+>", piece)}
        self._end_names = {context.pieces[one].decode() for one in ends if one < len(context.pieces)} & self._special

    def compile(self, grammar: Grammar) -> LLGuidanceGrammar:
        try:
            branches = self._written(grammar)
            new_ending = self._new_ending(grammar)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise _refused(f"not valid JSON: {error}") from None
        num_bytes = sum(_BASE_BYTES + _BYTES_PER_CHARACTER * len(text) for branch in branches for text in branch)
        try:
            matchers = [[self._matcher(text) for text in branch] for branch in branches]
            return LLGuidanceGrammar(matchers, num_bytes, self._ends, new_ending)
        except RequestError as error:
            raise _refused(self._place(grammar) + error.message.removeprefix(_PREFIX)) from None

    def _new_ending(self, grammar: Grammar) -> Callable[[], Ending] | None:
        """Return what makes the check of an output's values; None if its grammar says all about them."""
        calls: list[CallShape] = []
        answer: Any = True
        match grammar.kind:
            case "json_schema":
                answer = msgspec.json.decode(grammar.source)
            case "tool_calls":
                shape = msgspec.json.decode(grammar.source, type=CallsShape)
                calls = shape.calls
                if shape.otherwise is not None and shape.otherwise.kind == "json_schema":
                    answer = msgspec.json.decode(shape.otherwise.source)
            case "structural_tag":
                calls = msgspec.json.decode(grammar.source, type=TagsShape).tags
        judges = {begin: _judge(call.schema) for call in calls if call.values is None for begin in call.begins}
        judge = _judge(answer)
        if judge is None and not any(judges.values()):
            return None
        return partial(Ending, self._pieces, judges, judge, grammar.thinking)

    def _place(self, grammar: Grammar) -> str:
        """Return the path, for a message, of the refused part of a schema and its function; '' if unknown."""
        match grammar.kind:
            case "json_schema":
                named = [("", msgspec.json.decode(grammar.source))]
            case "tool_calls":
                calls = msgspec.json.decode(grammar.source, type=CallsShape).calls
                named = [(f"function '{call.name}': parameters", call.schema) for call in calls]
            case "structural_tag":
                tags = msgspec.json.decode(grammar.source, type=TagsShape).tags
                named = [(f"tag {tag.begin!r}: schema", tag.schema) for tag in tags]
            case _:
                return ""
        for name, schema in named:
            if reason := self._reason(schema):
                path = schemas.refused_at(schemas.simplified(schema), self._reason, reason)
                return ".".join(part for part in (name, path) if part) + (": " if name or path else "")
        return ""

    def _reason(self, schema: Any) -> str:
        """Return why a schema is refused; '' if it is not."""
        try:
            self._matcher(self._behind_thoughts(f"start: {self._json_rule(_schema(schema))}", "none"))
        except RequestError as error:
            return error.message
        return ""

    def _limit(self, times: int) -> None:
        """Raise RequestError for too many repetitions, as each takes a state of the lexer."""
        if times > self._options.max_lexer_states:
            raise _refused(
                f"it repeats something {times} times; at most {self._options.max_lexer_states} repetitions "
                "are supported (max_lexer_states of grammar.llguidance)"
            )

    def _matcher(self, text: str) -> LLMatcher:
        limits = llguidance.LLParserLimits(
            max_lexer_states=self._options.max_lexer_states,
            max_grammar_size=self._options.max_grammar_size,
            max_items_in_row=self._options.max_items_in_row,
            verbose_errors=False,
        )
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        first = np.zeros(-(-self._vocab_size // 32), dtype=np.int32)
        if not matcher.is_error():
            # A copy computes it: the original stays at the start.
            trial = matcher.deep_copy()
            trial.unsafe_compute_mask_ptr(first.ctypes.data, first.nbytes)
            if trial.is_error() or not first.any():
                raise _refused(_shortened(trial.get_error()) or "it allows no output at all")
        if matcher.is_error():
            raise _refused(_shortened(matcher.get_error()))
        return matcher

    def _written(self, grammar: Grammar) -> list[list[str]]:
        """Return the branches of ``LLGuidanceMatcher``."""
        # Text that could begin with a thought would consume it, as the longer match.
        thinks = grammar.thinking == "optional" and OPEN not in self._special
        not_begun = f"{SPACE}{OPEN}" if thinks else ""
        if grammar.kind == "structural_tag":
            tags = msgspec.json.decode(grammar.source, type=TagsShape)
            return [[self._behind_thoughts(self._tags(tags, not_begun), grammar.thinking)]]
        if grammar.kind != "tool_calls":
            lark = self._lark(grammar)
            self._limit(_repeats(grammar, lark))
            return [[self._behind_thoughts(lark, grammar.thinking)]]
        shape = msgspec.json.decode(grammar.source, type=CallsShape)
        if shape.otherwise is None:
            self._limit(min(repeats.of_schema(_object_schema(call.schema)) for call in shape.calls))
        branches = [[self._calls(shape, not_begun)]]
        if (otherwise := shape.otherwise) is not None and not otherwise.opening:
            branches.append([])
            if otherwise.kind != "text":
                answer = msgspec.convert({"kind": otherwise.kind, "source": otherwise.source}, Grammar)
                branches[1].append(self._lark(answer))
            if otherwise.not_begun:
                branches[1].append(f"start: TEXT\nTEXT: {_text_but(otherwise.not_begun, not_begun)}")
        return [[self._behind_thoughts(lark, grammar.thinking) for lark in branch] for branch in branches]

    def _behind_thoughts(self, lark: str, thinking: Thinking) -> str:
        """Return a list of Lark grammars, as JSON; the output starts in the first."""
        answer = {"name": "answer", "lark_grammar": _NO_FORCING + lark}
        if thinking == "none":
            return msgspec.json.encode({"grammars": [answer]}).decode()
        start = "thoughts @answer" if thinking == "open" else f"({self._literal(OPEN)} thoughts)? @answer"
        lines = [f"start: {start}", "thoughts: inside space", "space: /\\s{0,8}/"]
        if CLOSE in self._special:
            lines.append(f"inside: /(?s:.*)/ {CLOSE}")
        else:
            lines.append(f'inside[suffix="{CLOSE}"]: /(?s:.*)/')
        head = {"name": "start", "lark_grammar": _NO_FORCING + "\n".join(lines)}
        return msgspec.json.encode({"grammars": [head, answer]}).decode()

    def _lark(self, grammar: Grammar) -> str:
        match grammar.kind:
            case "json_object":
                return f"start: {self._json_rule({'type': 'object'})}"
            case "json_schema":
                return f"start: {self._json_rule(_schema(msgspec.json.decode(grammar.source)))}"
            case "regex":
                return f"start: /{llguidance.regex_to_lark(grammar.source)}/"
            case "choice":
                choices = msgspec.json.decode(grammar.source, type=list[str])
                if not 1 <= len(choices) <= _MAX_CHOICES or not all(choices):
                    raise _refused(f"expected 1 to {_MAX_CHOICES} strings, none of them empty")
                return "start: " + " | ".join(_quoted(choice) for choice in choices)
            case "ebnf":
                try:
                    # The converter and some authors write options; ours are set above.
                    return re.sub(r"^%llguidance.*$", "", str(any_to_lark(grammar.source)), flags=re.MULTILINE)
                except Exception as error:  # the converter has its own error classes
                    raise _refused(_shortened(str(error))) from None
            case "tool_calls" | "structural_tag":
                raise AssertionError("_calls and _tags write these kinds, which cannot be the answer next to calls")

    def _calls(self, shape: CallsShape, not_begun: str) -> str:
        """Return the grammar of calls, alone or in text.  not_begun: a pattern that this text does not begin with."""
        otherwise = shape.otherwise
        if otherwise is not None and otherwise.quoting:
            return "\n".join([*self._messages(shape, otherwise), *self._each(shape.calls, otherwise.opening)])
        if otherwise is not None and otherwise.opening:
            opening = otherwise.opening
            tag = shape.calls[0].begin.partition(opening)[0].strip()
            if tag in self._special:  # it cannot be a part of the text
                lines = self._text_with_calls(shape.many, tag, not_begun, rf"(?s:.*){re.escape(opening)}")
                opening = tag
            else:
                lines = self._text_with_calls(shape.many, opening, not_begun)
            return "\n".join([*lines, *self._each(shape.calls, opening)])
        more = f" ({_quoted(shape.separator)} call){{0,{_MAX_CALLS - 1}}}" if shape.many else ""
        tag = f"({self._literal(shape.tag)})? " if shape.tag else ""
        before, after = (self._literal(text) if text else "" for text in shape.around)
        return "\n".join([f"start: {tag}{before} call{more} {after}", *self._each(shape.calls)])

    def _text_with_calls(self, many: bool, opening: str, not_begun: str, never: str = "") -> list[str]:
        """Return the rules of free text in which a call must follow each marker of a call.

        never: a pattern that no text may begin with."""
        marker = self._literal(opening)
        lazy = "" if opening in self._special else "[lazy]"
        behind = "(begun call)* TEXT" if many else ""
        return [
            f"start: begun_first call {behind} | FIRST",
            f"begun_first{lazy}: FIRST {marker}",
            f"begun{lazy}: TEXT {marker}",
            f"FIRST: {_text_but(not_begun, never)}",
            f"TEXT: {_text_but(never)}",
        ]

    def _messages(self, shape: CallsShape, otherwise: Otherwise) -> list[str]:
        """Return the rules of free text with markers, in which a call must follow its opening, except in quotations."""
        markers = [*otherwise.markers, *otherwise.quoting]
        plain = [marker for marker in markers if marker not in self._special]
        lines = ["start: outside", "ANY: /(?s:.*)/", f"begun[lazy]: ANY {self._literal(otherwise.opening)}"]
        calls = f"begun call {'outside?' if shape.many else ''}"
        for rule, more, never in (
            ("outside", [calls], [*plain, otherwise.opening]),
            ("inside", [], plain),
        ):
            text = rule.upper()
            without = rf"(?s:.*)({'|'.join(map(re.escape, never))})" if never else ""
            lines.append(f"{text}: {_text_but(without)}")
            for number, marker in enumerate(markers):
                passed = f"{rule}_{number}"
                is_special = marker in self._special
                begin = f"{passed}: {text}" if is_special else f"{passed}[lazy]: ANY"
                lines.append(f"{begin} {self._literal(marker)}")
                more = [*more, f"{passed} {'inside' if marker in otherwise.quoting else 'outside'}"]
            lines.append(f"{rule}: {' | '.join([text, *more])}")
        return lines

    def _tags(self, shape: TagsShape, not_begun: str) -> str:
        """Return the grammar of free text in which a tag must follow each trigger."""
        lines = [f"FIRST: {_text_but(not_begun)}", f"TEXT: {_text_but()}"]
        found = []
        for number, trigger in enumerate(sorted(set(shape.triggers), key=len)):
            # Of two triggers with a common beginning the shorter one is complete first, so it has the tags of both.
            tags = [tag for tag in shape.tags if tag.begin.startswith(trigger)]
            shorter = [other for other in shape.triggers if other != trigger and trigger.startswith(other)]
            if not tags or shorter:
                continue
            marker, lazy = self._literal(trigger), "" if trigger in self._special else "[lazy]"
            lines += [f"first_{number}{lazy}: FIRST {marker}", f"begun_{number}{lazy}: TEXT {marker}"]
            lines += self._each(tags, trigger, rule=f"tag_{number}", read=_schema)
            found.append(number)
        first = " | ".join(f"first_{number} tag_{number}" for number in found)
        more = " | ".join(f"begun_{number} tag_{number}" for number in found)
        start = f"start: ({first})" + ("" if shape.stop_after_first else f" ({more})* TEXT")
        return "\n".join([start if shape.at_least_one else f"{start} | FIRST", *lines])

    def _each(
        self,
        calls: list[CallShape],
        opening: str = "",
        rule: str = "call",
        read: Callable[[Any], dict[str, Any]] | None = None,
    ) -> list[str]:
        """Return the rules of a call.  opening: the part that is written already.  read: converts its schema."""
        names = [f"{rule}_{index}" for index in range(len(calls))]
        lines = [f"{rule}: {' | '.join(names)}"]
        for name, call in zip(names, calls, strict=True):
            begin = self._literal(call.begin.partition(opening)[2] if opening else call.begin)
            if call.then:
                begin += f" ({' | '.join(map(self._literal, call.then))})"
            end = self._literal(call.end)
            lines.append(f"{name}: {begin} {name}_arguments {f'({end})?' if call.end in self._end_names else end}")
            if call.values is None:
                lines.append(f"{name}_arguments: {self._json_rule((read or _object_schema)(call.schema))}")
            else:
                lines += self._values(f"{name}_arguments", call)
        return lines

    def _values(self, rule: str, call: CallShape) -> list[str]:
        """Return the rules of arguments that are written one by one."""
        values, schema = call.values or [], call.schema
        names = [f"{rule}_{index}" for index in range(len(values))]
        if call.between:
            lines = _separated(rule, names, values, self._literal(call.between))
        else:
            counts = ["*" if not one.name else "" if one.is_required else "?" for one in values]
            lines = [f"{rule}: {' '.join(map(''.join, zip(names, counts, strict=True)))}"]
        for name, value in zip(names, values, strict=True):
            begin = self._literal(value.begin) if value.begin else ""
            if not value.name:
                first, more = ("[A-Za-z_]", r"\w") if call.between else (r"[^<>\n]", r"[^<>\n]")
                begin += f" /{first}{more}{{0,{_MAX_NAME_CHARS - 1}}}/ {self._literal(value.then)}"
            lines.append(f"{name}: {begin} {name}_value")
            end = self._literal(value.end) if value.end else ""
            match [] if call.between else bare_texts(schema, value.schema):
                case []:
                    whole: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
                    given = value.schema if isinstance(value.schema, dict) else {}
                    lines.append(f"{name}_value: {name}_json {end}")
                    lines.append(f"{name}_json: {self._json_rule({**whole, **given}, judged=False)}")
                case [*texts]:
                    lines.append(f"{name}_value: ({' | '.join(map(_quoted, texts))}) {end}")
                case None:
                    lines += self._text_until(f"{name}_value", value.end)
        return lines

    def _text_until(self, rule: str, end: str) -> list[str]:
        """Return the rules of any text up to the marker that ``end`` is but for white space, and ``end``."""
        marker = end.strip()
        lazy = "" if marker in self._special else "[lazy]"
        rest = end.partition(marker)[2]
        lines = [f"{rule}: {rule}_text {_quoted(rest) if rest else ''}"]
        return [*lines, f"{rule}_text{lazy}: /(?s:.*)/ {self._literal(marker)}"]

    def _json_rule(self, schema: dict[str, Any], *, judged: bool = True) -> str:
        """Return the rule of a value.  judged: what no grammar expresses is left out of it."""
        guidance = {"whitespace_pattern": _WHITE_SPACE, "coerce_one_of": self._options.coerce_one_of}
        expressed = schemas.simplified(schema)
        if judged:
            expressed, _ = checks.divided(expressed)
        return f"%json {msgspec.json.encode({**expressed, 'x-guidance': guidance}).decode()}"

    def _literal(self, text: str) -> str:
        """Return the rule of a text that may name special tokens, which ordinary text cannot spell."""
        if not self._special:
            return _quoted(text)
        parts = re.split("(" + "|".join(map(re.escape, sorted(self._special))) + ")", text)
        return " ".join(part if part in self._special else _quoted(part) for part in parts if part)


class _Vocabulary:
    """The vocabulary in the form that ``TokenizerWrapper`` requires."""

    bos_token_id = None

    def __init__(self, context: GrammarContext) -> None:
        special = set(context.special_token_ids) | set(context.eos_token_ids)
        # A model's vocabulary may be padded: these tokens have no text and are never allowed.
        names = [*context.pieces, *[b"<unused>"] * (context.vocab_size - len(context.pieces))]
        special.update(token_id for token_id, name in enumerate(names) if token_id >= len(context.pieces) or not name)
        self.tokens = [
            _SPECIAL + (name or b"<empty>") if token_id in special else name for token_id, name in enumerate(names)
        ][: context.vocab_size]
        self.special_token_ids = sorted(token_id for token_id in special if token_id < context.vocab_size)
        self.eos_token_id = context.eos_token_ids[0] if context.eos_token_ids else _unused(context)

    def __call__(self, text: bytes) -> list[int]:
        """Return no tokens: this is called for forced text only, and nothing is forced."""
        return []


def _unused(context: GrammarContext) -> int:
    """Return a token to use as the end token of a model without one."""
    return context.special_token_ids[0] if context.special_token_ids else context.vocab_size - 1


def _text_but(*not_begun: str) -> str:
    """Return an expression for any text that does not begin with a match of these expressions."""
    unlike = [f" & ~/(?s:({one.replace('/', _SLASH)}).*)/" for one in not_begun if one]
    return "/(?s:.*)/" + "".join(unlike)


def _separated(rule: str, names: list[str], values: list[ValueShape], between: str) -> list[str]:
    """Return the rules of values, those that are required and any of the others, with a separator between two.

    A rule for the values from each one on: an alternative for each would have as many names as the square of them."""
    ways = [] if any(one.is_required for one in values) else ['""']
    for index, (name, value) in enumerate(zip(names, values, strict=True)):
        more = "" if value.name else f"({between} {name})* "
        ways.append(f"{name} {more}{rule}_from_{index + 1}")
        if value.is_required:
            break
    lines = [f"{rule}: {' | '.join(ways)}", f'{rule}_from_{len(names)}: ""']
    for index, (name, value) in enumerate(zip(names, values, strict=True)):
        count = "" if value.is_required else "?"
        lines.append(f"{rule}_from_{index}: ({between} {name}){count} {rule}_from_{index + 1}")
    return lines


def _fill_all(branch: list[LLMatcher], mask: Mask) -> Mask:
    """Write the tokens that all matchers of the branch allow to the mask."""
    for index, matcher in enumerate(branch):
        part = np.empty_like(mask) if index else mask
        matcher.unsafe_compute_mask_ptr(part.ctypes.data, part.nbytes)
        if matcher.is_error():
            raise GrammarFailure(_shortened(matcher.get_error()))
        if index:
            mask &= part
    return mask


def _repeats(grammar: Grammar, lark: str) -> int:
    """Return how often every output repeats something, as far as that is evident.  lark: the translated grammar."""
    match grammar.kind:
        case "json_schema":
            return repeats.of_schema(msgspec.json.decode(grammar.source))
        case "regex":
            return repeats.of_expression(grammar.source)
        case "ebnf":
            return repeats.of_lark(lark)
        case _:
            return 1


def _judge(schema: Any) -> checks.Judge | None:
    return checks.divided(schemas.simplified(schema))[1]


def _schema(schema: Any) -> dict[str, Any]:
    if isinstance(schema, bool):
        return {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise _refused("a JSON Schema is an object or a boolean")
    return schema


def _object_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a call's arguments, which are an object even if the schema does not require it."""
    types = schema.get("type", "object")
    if "object" not in (types if isinstance(types, list) else [types]):
        raise _refused("the arguments of a function are an object, but its parameters have another type")
    return {**schema, "type": "object"}


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _shortened(message: str) -> str:
    """Return the message without the quoted part of the grammar."""
    first, _, _ = message.replace("<non-verbose/>", "").partition("\n")
    return _IN_GRAMMAR.sub("", " ".join(first.split()))[:_MAX_MESSAGE_CHARS]


def _refused(reason: str) -> RequestError:
    return RequestError(_PREFIX + reason, code="invalid_grammar", param="grammar")


@hookimpl
def callboard_grammar_engine(context: GrammarContext) -> LLGuidance:
    """Build the engine with ``LLGuidanceOptions``."""
    return LLGuidance(context)
