"""Grammars by llguidance: JSON Schema, regular expressions, GBNF and Lark, parsed by Earley's algorithm token by token.

Owns: how a grammar of ours is written in llguidance's Lark, and the limits that bound its time and memory.
Does not know: requests, devices.

What constrains and is not understood is refused, never left out, with the path to where it stands; but ``oneOf`` may
be followed as ``anyOf``.  No ``$ref`` is fetched.  White space between the tokens of JSON is bounded, so that no model
can write it for ever.
"""

import re
from collections.abc import Callable
from typing import Any, Final

import llguidance
import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from engine.plugins.grammar import repeats, schemas
from engine.plugins.hookspecs import GrammarContext, hookimpl
from engine.plugins.options import Options, decode_options
from engine.text.grammar import GrammarFailure, Mask
from engine.text.reasoning import CLOSE, OPEN, Thinking
from engine.text.tool_format import SPACE, CallShape, CallsShape, TagsShape
from engine.types.errors import RequestError
from engine.types.params import Grammar

CALLBOARD_PLUGIN = {"api": 1, "packages": ["llguidance"]}

_MAX_CHOICES: Final = 4096
_MAX_CALLS: Final = 32
_MAX_MESSAGE_CHARS: Final = 300
# Between the tokens of JSON: at most a space, or a new line and its indentation.
_WHITE_SPACE: Final = "( |\\n[ \\t]{0,24})?"
# Where only one text can follow, the model still chooses its tokens, as it would unconstrained.
_NO_FORCING: Final = '%llguidance {"no_forcing": true}\n\n'
# Prefixes the name of a special token in llguidance's vocabulary: no text can spell it.
_SPECIAL: Final = b"\xff"
_SLASH: Final = "\\/"  # as Lark's expressions want it
_IN_GRAMMAR: Final = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_PREFIX: Final = "the grammar or schema cannot be used: "
_BASE_BYTES: Final = 64 << 10
_BYTES_PER_CHARACTER: Final = 64


class LLGuidanceOptions(Options, frozen=True):
    """max_lexer_states: of one grammar, about 2 kB each; beyond it a request fails.  max_grammar_size: symbols.
    max_items_in_row: ways in which the text so far can be read; beyond it a request fails, as work grows with them.
    coerce_one_of: a oneOf whose branches may overlap is an anyOf; if not, it is refused."""

    max_lexer_states: int = 20_000
    max_grammar_size: int = 100_000
    max_items_in_row: int = 2_000
    coerce_one_of: bool = True


Branches = list[list[LLMatcher]]


class LLGuidanceMatcher:
    """Follows one output.  branches: the output is as one of them says, and all matchers of that one agree with it.

    Alternatives that share a grammar would share its lexer as well, whose longest match hides what is shorter.
    """

    def __init__(self, branches: Branches) -> None:
        self._branches = branches

    def consume(self, token_id: int) -> None:
        left = [branch for branch in self._branches if all(matcher.consume_token(token_id) for matcher in branch)]
        if not left:
            error = next(matcher.get_error() for matcher in self._branches[0] if matcher.is_error())
            raise GrammarFailure(_shortened(error))
        self._branches = left

    def fill(self, mask: Mask) -> None:
        first, *others = self._branches
        _fill_all(first, mask)
        for branch in others:
            mask |= _fill_all(branch, np.empty_like(mask))
        if not mask.any():
            raise GrammarFailure("nothing may follow, not even the end")


class LLGuidanceGrammar:
    """A grammar whose first mask has been computed, where some grammars turn out to be too large."""

    def __init__(self, branches: Branches, num_bytes: int) -> None:
        self._branches = branches
        self.num_bytes = num_bytes

    def matcher(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher([[matcher.deep_copy() for matcher in branch] for branch in self._branches])


class LLGuidance:
    """One model's vocabulary as llguidance wants it."""

    def __init__(self, context: GrammarContext) -> None:
        self._vocab_size = context.vocab_size
        self._options = decode_options("grammar.llguidance", context.options, LLGuidanceOptions)
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Vocabulary(context)), eos_token=list(context.eos_token_ids) or [_unused(context)]
        )
        special = sorted({context.pieces[token_id] for token_id in context.special_token_ids})
        self._special = {piece.decode() for piece in special if re.fullmatch(rb"<[^<>\s]+>", piece)}

    def compile(self, grammar: Grammar) -> LLGuidanceGrammar:
        try:
            branches = self._written(grammar)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise _refused(f"not valid JSON: {error}") from None
        num_bytes = sum(_BASE_BYTES + _BYTES_PER_CHARACTER * len(text) for branch in branches for text in branch)
        try:
            return LLGuidanceGrammar([[self._matcher(text) for text in branch] for branch in branches], num_bytes)
        except RequestError as error:
            raise _refused(self._place(grammar) + error.message.removeprefix(_PREFIX)) from None

    def _place(self, grammar: Grammar) -> str:
        """Which part of a schema is refused, and of which function, for a message; empty if that is not known."""
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
        """Why a schema is refused; empty if it is not."""
        try:
            self._matcher(self._behind_thoughts(f"start: {self._json_rule(_schema(schema))}", "none"))
        except RequestError as error:
            return error.message
        return ""

    def _limit(self, times: int) -> None:
        """Raise RequestError for what plainly cannot be satisfied: each repetition takes a state of the lexer."""
        if times > self._options.max_lexer_states:
            raise _refused(
                f"it demands that something is repeated {times} times; at most {self._options.max_lexer_states} "
                "can be followed (max_lexer_states of grammar.llguidance)"
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
            # By a copy: the original stays at the start.
            trial = matcher.deep_copy()
            trial.unsafe_compute_mask_ptr(first.ctypes.data, first.nbytes)
            if trial.is_error() or not first.any():
                raise _refused(_shortened(trial.get_error()) or "it allows no output at all")
        if matcher.is_error():
            raise _refused(_shortened(matcher.get_error()))
        return matcher

    def _written(self, grammar: Grammar) -> list[list[str]]:
        """The branches of ``LLGuidanceMatcher``."""
        # Text that could begin with a thought would swallow it, as the longer match.
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
        """A list of Lark grammars, as JSON; the first is where the output starts."""
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
                    # Both the converter and some authors write options of their own; ours stand above.
                    return re.sub(r"^%llguidance.*$", "", str(any_to_lark(grammar.source)), flags=re.MULTILINE)
                except Exception as error:  # the converter has a tree of its own errors
                    raise _refused(_shortened(str(error))) from None
            case "tool_calls" | "structural_tag":
                raise AssertionError("they are written by _calls and _tags, and cannot be an answer beside calls")

    def _calls(self, shape: CallsShape, not_begun: str) -> str:
        """The grammar of calls alone, or in free text.  not_begun: matches how that text may not begin."""
        otherwise = shape.otherwise
        if otherwise is not None and otherwise.opening:
            lines = self._text_with_calls(shape.many, otherwise.opening, not_begun)
            return "\n".join([*lines, *self._each(shape.calls, otherwise.opening)])
        more = f" ({_quoted(shape.separator)} call){{0,{_MAX_CALLS - 1}}}" if shape.many else ""
        tag = f"({self._literal(shape.tag)})? " if shape.tag else ""
        return "\n".join([f"start: {tag}call{more}", *self._each(shape.calls)])

    def _text_with_calls(self, many: bool, opening: str, not_begun: str) -> list[str]:
        """The rules of free text in which a call must follow wherever the marker of a call is written."""
        marker = self._literal(opening)
        lazy = "" if opening in self._special else "[lazy]"
        behind = "(begun call)* TEXT" if many else ""
        return [
            f"start: begun_first call {behind} | FIRST",
            f"begun_first{lazy}: FIRST {marker}",
            f"begun{lazy}: TEXT {marker}",
            f"FIRST: {_text_but(not_begun)}",
            f"TEXT: {_text_but()}",
        ]

    def _tags(self, shape: TagsShape, not_begun: str) -> str:
        """The grammar of free text in which a tag must follow wherever its trigger is written."""
        lines = [f"FIRST: {_text_but(not_begun)}", f"TEXT: {_text_but()}"]
        found = []
        for number, trigger in enumerate(sorted(set(shape.triggers), key=len)):
            # Of two triggers that begin alike the shorter one is complete first, so it has the tags of both.
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
        """The rules of a call.  opening: what has been written of one already.  read: makes a schema of what it has."""
        names = [f"{rule}_{index}" for index in range(len(calls))]
        lines = [f"{rule}: {' | '.join(names)}"]
        for name, call in zip(names, calls, strict=True):
            begin = self._literal(call.begin.removeprefix(opening))
            lines.append(f"{name}: {begin} {name}_arguments {self._literal(call.end)}")
            lines.append(f"{name}_arguments: {self._json_rule((read or _object_schema)(call.schema))}")
        return lines

    def _json_rule(self, schema: dict[str, Any]) -> str:
        guidance = {"whitespace_pattern": _WHITE_SPACE, "coerce_one_of": self._options.coerce_one_of}
        return f"%json {msgspec.json.encode({**schemas.simplified(schema), 'x-guidance': guidance}).decode()}"

    def _literal(self, text: str) -> str:
        """The rule of a text that may name special tokens, which only they themselves can spell."""
        if not self._special:
            return _quoted(text)
        parts = re.split("(" + "|".join(map(re.escape, sorted(self._special))) + ")", text)
        return " ".join(part if part in self._special else _quoted(part) for part in parts if part)


class _Vocabulary:
    """What ``TokenizerWrapper`` asks for."""

    bos_token_id = None

    def __init__(self, context: GrammarContext) -> None:
        special = set(context.special_token_ids) | set(context.eos_token_ids)
        # A model's vocabulary may be padded: such tokens have no text and are never allowed.
        names = [*context.pieces, *[b"<unused>"] * (context.vocab_size - len(context.pieces))]
        special.update(token_id for token_id, name in enumerate(names) if token_id >= len(context.pieces) or not name)
        self.tokens = [
            _SPECIAL + (name or b"<empty>") if token_id in special else name for token_id, name in enumerate(names)
        ][: context.vocab_size]
        self.special_token_ids = sorted(token_id for token_id in special if token_id < context.vocab_size)
        self.eos_token_id = context.eos_token_ids[0] if context.eos_token_ids else _unused(context)

    def __call__(self, text: bytes) -> list[int]:
        """No tokens: this is asked about forced text alone, and nothing is forced."""
        return []


def _unused(context: GrammarContext) -> int:
    """A token that stands for the end where a model has none."""
    return context.special_token_ids[0] if context.special_token_ids else context.vocab_size - 1


def _text_but(*not_begun: str) -> str:
    """Any text that does not begin as one of these expressions says."""
    unlike = [f" & ~/(?s:({one.replace('/', _SLASH)}).*)/" for one in not_begun if one]
    return "/(?s:.*)/" + "".join(unlike)


def _fill_all(branch: list[LLMatcher], mask: Mask) -> Mask:
    """Write to the mask what all matchers of the branch allow."""
    for index, matcher in enumerate(branch):
        part = np.empty_like(mask) if index else mask
        matcher.unsafe_compute_mask_ptr(part.ctypes.data, part.nbytes)
        if matcher.is_error():
            raise GrammarFailure(_shortened(matcher.get_error()))
        if index:
            mask &= part
    return mask


def _repeats(grammar: Grammar, lark: str) -> int:
    """How often every output repeats something, as far as that is plain.  lark: what the grammar became."""
    match grammar.kind:
        case "json_schema":
            return repeats.of_schema(msgspec.json.decode(grammar.source))
        case "regex":
            return repeats.of_expression(grammar.source)
        case "ebnf":
            return repeats.of_lark(lark)
        case _:
            return 1


def _schema(schema: Any) -> dict[str, Any]:
    if isinstance(schema, bool):
        return {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise _refused("a JSON Schema is an object or a boolean")
    return schema


def _object_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a call's arguments: they are an object, whether the schema says so or not."""
    types = schema.get("type", "object")
    if "object" not in (types if isinstance(types, list) else [types]):
        raise _refused("the arguments of a function are an object, and the type in its parameters is another one")
    return {**schema, "type": "object"}


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _shortened(message: str) -> str:
    """The message without the part of the grammar that some quote."""
    first, _, _ = message.replace("<non-verbose/>", "").partition("\n")
    return _IN_GRAMMAR.sub("", " ".join(first.split()))[:_MAX_MESSAGE_CHARS]


def _refused(reason: str) -> RequestError:
    return RequestError(_PREFIX + reason, code="invalid_grammar", param="grammar")


@hookimpl
def callboard_grammar_engine(context: GrammarContext) -> LLGuidance:
    """Takes the options of ``LLGuidanceOptions``."""
    return LLGuidance(context)
