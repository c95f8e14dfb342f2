"""The conformance kit for grammar engines: one call checks an engine, and lists every case that fails.

    from callboard.plugins.testing import check_grammar_engine
    check_grammar_engine(WordsEngine)

Owns: a small vocabulary, grammars with texts that match and texts that do not, random walks along masks.
Does not know: torch, any library.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from engine.plugins.hookspecs import GrammarContext
from engine.plugins.proof.findings import Findings
from engine.plugins.testing.promises import at_once, watch_memory
from engine.text.grammar import CompiledGrammar, GrammarEngine, Mask, Matcher
from engine.types.errors import RequestError
from engine.types.params import Grammar

EOS, SPECIAL = 256, 257
# Every byte, so that every text has tokens, and some longer pieces, so that it has several spellings.
PIECES = (*(bytes([byte]) for byte in range(256)), b"<eos>", b"<special>", b'{"', b"ap", b"app", b"le", b"12", b"")
VOCAB_SIZE = 320  # of the model; larger than the number of pieces
LONGEST = max(map(len, PIECES[SPECIAL + 1 :]))
NUM_WALKS, MOST_STEPS = 8, 24
NUM_COMPILED = 50  # each takes milliseconds
BAD_REQUEST = range(400, 500)
Make = Callable[[GrammarContext], GrammarEngine]


@dataclass(frozen=True, slots=True)
class GrammarExample:
    """A grammar with examples.

    accepts: texts that are whole outputs.  refuses: texts that are not, including beginnings of outputs."""

    grammar: Grammar
    accepts: tuple[str, ...]
    refuses: tuple[str, ...]


SCHEMA = '{"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": false}'
EXAMPLES = (
    GrammarExample(Grammar("choice", '["apple", "apricot", "é"]'), ("apple", "apricot", "é"), ("", "ap", "apples")),
    GrammarExample(Grammar("regex", "(12)+[a-c]?"), ("12", "1212b"), ("", "1", "12d", "12bb")),
    GrammarExample(Grammar("json_schema", SCHEMA), ('{"a":1}', '{"a": 22}'), ('{"a":2}', '{"a":1', '{"b":1}', "[]")),
    GrammarExample(Grammar("json_object"), ("{}", '{"x":[1,"y"]}'), ("[1]", '{"x"', "apple")),
    GrammarExample(Grammar("ebnf", 'root ::= "ap" ("ple" | "ricot")'), ("apple", "apricot"), ("ap", "pple")),
)
WRONG = (
    Grammar("choice", "[]"),
    Grammar("choice", "no JSON"),
    Grammar("regex", "(12"),
    Grammar("json_schema", '{"type": '),
    Grammar("json_schema", '{"type": "nonsense"}'),
    Grammar("ebnf", "root ::= ("),
)


def check_grammar_engine(make: Make, examples: Sequence[GrammarExample] = EXAMPLES) -> None:
    """Compile the examples, walk along their masks, try wrong grammars.  Raises ConformanceError with all that fails.

    make: builds a new one each time, as the plugin's hook does.  examples: may include kinds that the engine refuses,
    except for at least one."""
    findings = Findings("grammar engine")
    context = GrammarContext(VOCAB_SIZE, PIECES, (EOS, SPECIAL), (EOS,))
    known: list[GrammarExample] = []
    findings.timed("kinds", lambda: known.extend(_known(make(context), examples)))
    for example in known:
        kind = example.grammar.kind
        findings.timed(f"{kind}: outputs", partial(_check_outputs, example, make, context))
        findings.timed(f"{kind}: every way can continue", partial(_check_walks, example.grammar, make, context))
        findings.timed(f"{kind}: matchers", partial(_check_matchers, example, make, context))
    for grammar in WRONG:
        findings.timed(f"wrong: {grammar.kind} {grammar.source}", partial(_check_refused, grammar, make, context))
    if known:
        findings.timed("threads", lambda: _check_threads(known, make(context)))
        findings.timed("memory", lambda: _check_memory(known[0], make(context)))
    findings.conclude()


def _known(engine: GrammarEngine, examples: Sequence[GrammarExample]) -> list[GrammarExample]:
    """Return the examples that the engine does not refuse."""
    found, reasons = [], []
    for example in examples:
        try:
            compiled = engine.compile(example.grammar)
        except RequestError as error:
            _check_status(error)
            reasons.append(f"{example.grammar.kind}: {error}")
            continue
        assert isinstance(compiled, CompiledGrammar), f"compile returned {compiled!r}, which is not a CompiledGrammar"
        assert compiled.num_bytes >= 0, f"num_bytes is {compiled.num_bytes}"
        found.append(example)
    assert found, f"it refuses every example: {'; '.join(reasons)}"
    return found


def _check_outputs(example: GrammarExample, make: Make, context: GrammarContext) -> None:
    compiled = make(context).compile(example.grammar)
    for text in example.accepts:
        for pieces in _spellings(text):
            _follow(compiled.matcher(), pieces, text)
    for text in example.refuses:
        for pieces in _spellings(text):
            matcher = _Watched(compiled.matcher())
            allowed = matcher.allowed()
            for token_id in pieces:
                if token_id not in allowed:
                    break
                matcher.consume(token_id)
                allowed = matcher.allowed()
            else:
                assert EOS not in allowed, f"{text!r} may be an output"


class _Watched:
    """A matcher whose calls and masks are checked."""

    def __init__(self, matcher: Matcher) -> None:
        self.consume = at_once(matcher.consume, "consume")
        self._fill = at_once(matcher.fill, "fill")

    def mask(self) -> Mask:
        """Return the allowed next tokens, and check that the buffer's old content does not matter."""
        ones, zeros = (np.full(VOCAB_SIZE // 32, value, dtype=np.int32) for value in (-1, 0))
        self._fill(ones)
        self._fill(zeros)
        assert (ones == zeros).all(), (
            "fill leaves bits of the buffer unchanged, or returns another mask the second time"
        )
        return ones

    def allowed(self) -> set[int]:
        """Return the allowed next tokens as ids."""
        ids = set(np.flatnonzero(np.unpackbits(self.mask().view(np.uint8), bitorder="little")).tolist())
        beyond = {token_id for token_id in ids if token_id >= len(PIECES) or not PIECES[token_id]}
        assert not beyond, f"tokens without text may come next: {sorted(beyond)[:5]}"
        assert SPECIAL not in ids, "a special token that the grammar does not name may come next"
        return ids


def _follow(matcher: Matcher, pieces: Sequence[int], text: str) -> None:
    watched, so_far = _Watched(matcher), b""
    for token_id in pieces:
        allowed = watched.allowed()
        assert token_id in allowed, f"{PIECES[token_id]!r} may not follow {so_far!r} of the output {text!r}"
        watched.consume(token_id)
        so_far += PIECES[token_id]
    assert EOS in watched.allowed(), f"the output may not end after {text!r}"


def _spellings(text: str) -> list[list[int]]:
    """Return the text as single bytes, and as the longest pieces."""
    raw = text.encode()
    longest, at = [], 0
    while at < len(raw):
        size = next(size for size in range(LONGEST, 0, -1) if raw[at : at + size] in PIECES)
        longest.append(PIECES.index(raw[at : at + size]))
        at += len(PIECES[longest[-1]])
    return [list(raw), longest]


def _check_walks(grammar: Grammar, make: Make, context: GrammarContext) -> None:
    """Pick any allowed token repeatedly: some token must always be allowed, until EOS."""
    compiled, rng = make(context).compile(grammar), np.random.default_rng(0)
    for _ in range(NUM_WALKS):
        matcher, so_far = _Watched(compiled.matcher()), b""
        for _ in range(MOST_STEPS):
            allowed = sorted(matcher.allowed())
            assert allowed, f"nothing may follow {so_far!r}"
            token_id = int(rng.choice(allowed))
            if token_id == EOS:
                break
            matcher.consume(token_id)
            so_far += PIECES[token_id]


def _check_matchers(example: GrammarExample, make: Make, context: GrammarContext) -> None:
    """Check two matchers of one grammar, one a token later, and new ones that get the same tokens at once, as after
    a loss."""
    compiled, pieces = make(context).compile(example.grammar), list(max(example.accepts, key=len).encode())
    first, second = _Watched(compiled.matcher()), _Watched(compiled.matcher())
    masks = [first.mask()]
    for token_id in pieces:
        first.consume(token_id)
        masks.append(first.mask())
        assert (second.mask() == masks[-2]).all(), "two matchers of one grammar affect each other"
        second.consume(token_id)
    for length in range(len(pieces) + 1):
        again = _Watched(compiled.matcher())
        for token_id in pieces[:length]:
            again.consume(token_id)
        assert (again.mask() == masks[length]).all(), f"a matcher that gets {length} tokens at once allows other tokens"


def _check_refused(grammar: Grammar, make: Make, context: GrammarContext) -> None:
    try:
        make(context).compile(grammar)
    except RequestError as error:
        _check_status(error)
    else:
        raise AssertionError("it is not refused; compile must raise RequestError")


def _check_status(error: RequestError) -> None:
    assert error.status in BAD_REQUEST, f"a grammar is refused with {error.status}, not as a client's mistake"


def _check_threads(known: Sequence[GrammarExample], engine: GrammarEngine) -> None:
    """Check several compilations at once, as in the tokenizer's workers."""

    def first_mask(example: GrammarExample) -> bytes:
        return _Watched(engine.compile(example.grammar).matcher()).mask().tobytes()

    alone = [first_mask(example) for example in known]
    with ThreadPoolExecutor(4) as pool:
        parallel = list(pool.map(first_mask, [*known] * 4))
    assert parallel == alone * 4, "a grammar that is compiled in parallel allows other tokens"


def _check_memory(example: GrammarExample, engine: GrammarEngine) -> None:
    pieces = list(max(example.accepts, key=len).encode())

    def use(number: int) -> None:
        matcher = engine.compile(example.grammar).matcher()
        for token_id in pieces:
            matcher.consume(token_id)

    watch_memory(use, "a grammar that is compiled and followed", NUM_COMPILED)
