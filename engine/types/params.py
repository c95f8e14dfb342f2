"""The sampling parameters of a request: one frozen struct, checked once when the request arrives.

Owns: names, defaults, ranges.  Does not know: tensors, tokenizers, HTTP.
"""

import numbers
from collections.abc import Callable, Mapping, Set
from collections.abc import Sequence as Many
from typing import Any, Literal, get_args

import msgspec

from engine.types.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_TOKEN_COUNT = 1 << 30
MAX_GRAMMAR_CHARS = 1 << 16
MAX_SEED = (1 << 63) - 1
GREEDY_TEMPERATURE = 1e-5  # below it the likeliest token is always taken
MIN_REPETITION_PENALTY = 0.01  # logits are divided by it, and must stay finite in float16 as well

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "ebnf", "tool_calls", "structural_tag"]
GRAMMAR_KINDS: tuple[str, ...] = get_args(GrammarKind)


class Grammar(msgspec.Struct, frozen=True):
    """The form that an output must have.

    kind and source: 'json_object' (no source), 'json_schema' (a JSON Schema), 'regex', 'choice' (a JSON array of
    strings), 'ebnf' (GBNF, or llguidance's dialect of Lark), 'tool_calls' and 'structural_tag' (``CallsShape`` and
    ``TagsShape`` of ``engine/text/tool_format.py``, as JSON).
    thinking: 'open' if the output begins inside the model's thoughts, which are unconstrained and end with
    ``</think>``; 'optional' if it may begin them with ``<think>``; 'none' if the grammar holds from the first token on.
    """

    kind: GrammarKind
    source: str = ""
    thinking: Literal["none", "open", "optional"] = "none"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules for picking tokens and for stopping.  Defaults are the OpenAI API's.

    temperature: 0 is greedy.  top_k: 0 or -1 is off.  top_p, min_p: 1 and 0 are off; top_p 0 is greedy too.
    repetition_penalty: > 1 discourages tokens seen in prompt or output (Keskar et al. 2019).
    presence_penalty, frequency_penalty: subtracted once / per occurrence in the output (OpenAI).
    logit_bias: token id -> value added to its logit, -100..100.
    seed: the same seed and prompt give the same tokens in any batch; with an adapter, unless a draw falls within
    rounding of the border between two tokens.
    logprobs: None is off, n returns the sampled token's log probability and the n most likely.
    logprob_token_ids: tokens whose log probabilities are returned in place of the most likely ones.
    processed_logprobs: log probabilities are those of the distribution that tokens are drawn from, after bias,
    penalties, constraints, temperature and cuts (greedy rows have temperature 1), and not the model's own.
    max_tokens: None means up to the end of the context.  min_tokens: generation does not stop before this many tokens.
    stop: strings that end the text.  stop_token_ids: ids that end it, besides the model's own EOS ids.
    grammar: the form that the output must have; tokens that break it are never picked.
    allowed_token_ids: the only tokens that may be picked, EOS only if listed; empty allows all.
    bad_words: texts whose tokens are not picked in a row, spelt both with and without a leading space.
    bad_token_ids: the token ids of these spellings; the tokenizer fills them in.
    prompt_logprobs: like logprobs, for the tokens of the prompt; processed ones know temperature and cuts alone.
    logits_processors: name of a plugin -> its parameters, a mapping, which is stored as JSON.
    pooling: the numbers that are wanted in place of text: 'last' or 'mean' for the last layer's normed output of the
    prompt's last token or the mean over all tokens, 'classify' for the logits of the labels; '' for text.
    whole_prompt: every token of the prompt is computed, even if its keys and values are cached; ``pooling`` sets it.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    processed_logprobs: bool = False
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    grammar: Grammar | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None
    logits_processors: dict[str, str] = {}
    pooling: str = ""
    whole_prompt: bool = False

    def __post_init__(self) -> None:
        """Convert the values of Python callers to each field's type: lists, NumPy's numbers, 5.0 for 5, None for ().

        Raises RequestError for any other type, so that later code never sees one."""
        for field, kinds, read in _FIELDS:
            value = getattr(self, field)
            if type(value) not in kinds and (given := read(field, value)) is not value:
                msgspec.structs.force_setattr(self, field, given)

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every prompt token must be computed, even if its keys and values are cached."""
        return self.whole_prompt or self.prompt_logprobs is not None

    @property
    def generates(self) -> bool:
        """Whether text is wanted."""
        return not self.pooling

    @property
    def reads_prompt(self) -> bool:
        """Whether results of the prompt are wanted, in addition to tokens or in place of them."""
        return self.prompt_logprobs is not None or not self.generates

    @property
    def has_form(self) -> bool:
        """Whether the output must have a form that the engine may not know."""
        return self.grammar is not None or bool(self.logits_processors)

    @property
    def is_constrained(self) -> bool:
        """Whether the tokens that may be picked depend on those before, or are limited."""
        return self.grammar is not None or self.limits_tokens

    @property
    def limits_tokens(self) -> bool:
        """Whether some tokens must not be picked, whatever a grammar says."""
        return bool(self.allowed_token_ids or self.bad_token_ids)

    def check(self, vocab_size: int) -> None:
        """Raise RequestError for the first value out of range; it names the field, the value and what is allowed."""
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_p", self.top_p, 0.0, 1.0)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 10.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("top_k", self.top_k, -1, MAX_TOKEN_COUNT)
        _within("min_tokens", self.min_tokens, 0, MAX_TOKEN_COUNT)
        if self.max_tokens is not None:
            _within("max_tokens", self.max_tokens, 1, MAX_TOKEN_COUNT)
            if self.min_tokens > self.max_tokens:
                raise _refused("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.seed is not None:
            _within("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _within("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.processed_logprobs and self.prompt_logprobs is not None and (field := self._depends_on_history()):
            reason = f"{field}: not possible together with processed log probabilities of the prompt; leave one out"
            raise RequestError(reason, param=field)
        if self.grammar is not None and len(self.grammar.source) > MAX_GRAMMAR_CHARS:
            raise _refused("grammar", f"{len(self.grammar.source)} characters", f"at most {MAX_GRAMMAR_CHARS}")
        if self.grammar is not None:
            _check_unicode("grammar", self.grammar.source)
        self._check_stops(vocab_size)
        self._check_bias(vocab_size)
        self._check_limits(vocab_size)

    def _depends_on_history(self) -> str:
        """Return the first field that is set and changes logits by the tokens before, or by rules of outputs; or ''."""
        fields = (
            *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "grammar"),
            *("allowed_token_ids", "bad_words", "logits_processors"),
        )
        return next((one for one in fields if getattr(self, one) != getattr(NEUTRAL, one)), "")

    def _check_limits(self, vocab_size: int) -> None:
        for field in ("allowed_token_ids", "logprob_token_ids"):
            for token_id in getattr(self, field):
                _within(field, token_id, 0, vocab_size - 1)
        if len(self.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            raise _refused(
                "logprob_token_ids", f"{len(self.logprob_token_ids)} ids", f"at most {MAX_LOGPROB_TOKEN_IDS}"
            )
        if self.logprob_token_ids and self.logprobs != 0:
            reason = f"logprob_token_ids: logprobs must be 0, not {self.logprobs}"
            raise RequestError(reason, param="logprob_token_ids")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise _refused("bad_words", f"{len(self.bad_words)} strings", f"at most {MAX_BAD_WORDS}")
        for word in self.bad_words:
            if not word.strip() or len(word) > MAX_STOP_STRING_CHARS:
                allowed = f"1 to {MAX_STOP_STRING_CHARS} characters, not only spaces"
                raise _refused("bad_words", f"a string of {len(word)} characters", allowed)
            _check_unicode("bad_words", word)

    def _check_stops(self, vocab_size: int) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise _refused("stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS}")
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                raise _refused(
                    "stop", f"a string of {len(text)} characters", f"1 to {MAX_STOP_STRING_CHARS} characters"
                )
            _check_unicode("stop", text)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise _refused("stop_token_ids", f"{len(self.stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS}")
        for token_id in self.stop_token_ids:
            _within("stop_token_ids", token_id, 0, vocab_size - 1)

    def _check_bias(self, vocab_size: int) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise _refused("logit_bias", f"{len(self.logit_bias)} entries", f"at most {MAX_LOGIT_BIAS}")
        for token_id, bias in self.logit_bias.items():
            _within("logit_bias", token_id, 0, vocab_size - 1)
            _within("logit_bias", bias, -100.0, 100.0)

    def replace(self, **changes: Any) -> "SamplingParams":
        """Return a copy with some fields changed."""
        return msgspec.structs.replace(self, **changes)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always picked."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_p == 0.0


def _integer(field: str, value: Any) -> int:
    try:
        whole = isinstance(value, numbers.Integral) or (isinstance(value, numbers.Real) and float(value).is_integer())
    except OverflowError:  # from converting a fraction
        whole = False
    if not whole or isinstance(value, bool):
        raise _refused(field, _shown(value), "an integer")
    return int(value)


def _number(field: str, value: Any) -> float:
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    raise _refused(field, _shown(value), "a number")


def _flag(field: str, value: Any) -> bool:
    if type(value).__name__ in ("bool", "bool_"):  # NumPy's name for it in its two major versions
        return bool(value)
    raise _refused(field, _shown(value), "true or false")


def _strings(field: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else _several(field, value, "a string or several")
    for text in texts:
        if not isinstance(text, str):
            raise _refused(field, _shown(text), "a string or several")
    # NumPy's strings are strings, but msgpack cannot encode them.
    return texts if all(type(text) is str for text in texts) else tuple(map(str.__str__, texts))


def _ids(field: str, value: Any) -> tuple[int, ...]:
    ids = _several(field, value, "a list of token ids")
    return ids if all(type(one) is int for one in ids) else tuple(_integer(field, one) for one in ids)


def _several(field: str, value: Any, allowed: str) -> tuple[Any, ...]:
    if type(value) is tuple:
        return value
    if value is None:
        return ()
    if isinstance(value, Many | Set) or getattr(value, "ndim", 0) == 1:  # NumPy's arrays are not Sequences
        return tuple(value)
    raise _refused(field, _shown(value), allowed)


def _biases(field: str, value: Any) -> dict[int, float]:
    if type(value) is dict and all(type(key) is int and type(bias) is float for key, bias in value.items()):
        return value
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _refused(field, _shown(value), "a mapping of token ids to numbers")
    biases = {}
    for key, bias in value.items():
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20:  # as in JSON
            key = int(key)
        biases[_integer(field, key)] = _number(field, bias)
    return biases


def _tables(field: str, value: Any) -> dict[str, str]:
    if value is None:
        return {}
    tables = value.values() if isinstance(value, Mapping) else (value,)
    try:
        if not all(isinstance(one, str | Mapping) for one in tables):
            raise TypeError
        msgspec.json.encode(value)  # checks the names too
        return {
            str.__str__(name): one if type(one) is str else msgspec.json.encode(one).decode()
            for name, one in value.items()
        }
    except (TypeError, ValueError, AttributeError, RecursionError):
        raise _refused(field, _shown(value), "a mapping of plugins' names to their parameters") from None


def _grammar(field: str, value: Any) -> Grammar:
    if not isinstance(value, Grammar):
        raise _refused(field, _shown(value), "a Grammar")
    if value.kind not in GRAMMAR_KINDS:
        raise _refused("grammar.kind", _shown(value.kind), f"one of {', '.join(GRAMMAR_KINDS)}")
    if type(value.source) is not str:
        raise _refused("grammar.source", _shown(value.source), "text")
    if value.thinking not in ("none", "open", "optional"):
        raise _refused("grammar.thinking", _shown(value.thinking), "one of none, open, optional")
    return value


def _pooling(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _refused(field, _shown(value), "a text, such as 'last' or 'mean'")
    return str.__str__(value)


NONE = type(None)
# For each field: the types that are stored unchanged, and the function that converts any other.
_FIELDS: tuple[tuple[str, tuple[type, ...], Callable[[str, Any], Any]], ...] = (
    *((field, (int, NONE), _integer) for field in ("max_tokens", "seed", "logprobs", "prompt_logprobs")),
    *((field, (int,), _integer) for field in ("min_tokens", "top_k")),
    *((field, (float,), _number) for field in ("temperature", "top_p", "min_p", "repetition_penalty")),
    *((field, (float,), _number) for field in ("presence_penalty", "frequency_penalty")),
    *((field, (bool,), _flag) for field in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")),
    *((field, (bool,), _flag) for field in ("whole_prompt", "processed_logprobs")),
    ("stop", (), _strings),
    ("stop_token_ids", (), _ids),
    ("allowed_token_ids", (), _ids),
    ("logprob_token_ids", (), _ids),
    ("bad_words", (), _strings),
    ("logit_bias", (), _biases),
    ("logits_processors", (), _tables),
    ("grammar", (NONE,), _grammar),
    ("pooling", (), _pooling),
)


def _within(field: str, value: float, low: float, high: float) -> None:
    # NaN fails every comparison, so the test is written as "inside", never as "outside".
    inside = low <= value <= high
    if not inside:
        raise _refused(field, _brief(value), f"from {low} to {high}")


def _check_unicode(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{field}: not valid Unicode (lone surrogate)", param=field) from None


def _brief(value: object) -> str:
    """Return a value's text for a message, shortened to 60 characters."""
    try:
        text = repr(value)
    except ValueError:  # repr of an integer with thousands of digits
        return "a huge number"
    return text if len(text) <= 60 else text[:57] + "..."


def _shown(value: object) -> str:
    """Return the text of a value of a wrong type, with its type, for a message."""
    return f"{_brief(value)} ({type(value).__name__})"


def _refused(field: str, observed: object, allowed: str) -> RequestError:
    return RequestError(f"{field}={observed}: must be {allowed}", param=field)


NEUTRAL = SamplingParams()
