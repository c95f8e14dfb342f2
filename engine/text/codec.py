"""Conversion between text and token ids for one model: prompts and chats to ids, each output's ids to text.

Owns: the tokenizer, and the choice of it by a configuration; the bytes of an incomplete character, and the number of
tokens in the visible text of an output.
Does not know: messages, open requests, event loops, what a model does with the ids, why a request ends.

An output becomes visible in three steps: it is detokenised, separated from thoughts, and cut at a stop string.
Detokenising costs 0.5 us per token on one core when tokens are pushed one by one, 0.04 us in large groups.

``encode`` and ``encode_chat`` take 10 ms for a long prompt and seconds for a hostile one: call them in a worker
thread, after a bound on the number of characters.  They encode by ``encode_batch_fast``, which releases the GIL;
``encode`` of the tokenizers library holds it and would stop the event loop from another thread.
"""

import codecs
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from engine.checkpoints.use import GENERATING, ModelUse
from engine.messages import Tokenize
from engine.settings.sections import ModelSection
from engine.text.chat import PLAIN
from engine.text.files import TokenizerFiles, read_template
from engine.text.pairs import ROLES, Pairs, cut_text, knows_pairs
from engine.text.pictures import FIRST_ID, NAME, PictureFormat, PictureText
from engine.text.reasoning import ReasoningFormat, ReasoningParser, Thinking
from engine.text.settings import ScoreSettings
from engine.text.stops import StopMatcher
from engine.text.tool_calls import ToolFormat
from engine.text.vocabulary import Vocabulary
from engine.types.errors import RequestError
from engine.types.logprobs import TokenText
from engine.types.params import SamplingParams
from engine.types.prompt import ChatOptions, ChatTurn, RequestPart

_LONGEST_CHARACTER_BYTES = 4

TokenIds = Sequence[int] | npt.NDArray[np.int32]


class Detokenizer:
    """The text of one sequence.  All pushed texts, joined, are the text of the tokens after the prompt.

    Bytes that are not UTF-8 come out as U+FFFD, one per maximal invalid part (Unicode 15, section 3.9).
    """

    __slots__ = ("_leading_spaces", "_pending", "_pieces", "_prompt_only")

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool, prompt_ids: TokenIds = ()) -> None:
        """Start after a prompt.  prompt_ids: they decide whether a leading space belongs to the text.  They may end in
        the middle of a character that the first tokens complete."""
        self._pieces = vocabulary.visible_pieces if skip_special_tokens else vocabulary.all_pieces
        before = self._last_bytes(prompt_ids)
        self._leading_spaces = 0 if before else vocabulary.leading_spaces
        self._pending = before[codecs.utf_8_decode(before, "replace", False)[1] :]
        self._prompt_only = True  # whether the pending bytes are all of the prompt

    def push(self, token_ids: TokenIds) -> str:
        """Return the text that these tokens complete."""
        pieces = self._pieces
        data = b"".join([pieces[token_id] for token_id in token_ids if 0 <= token_id < len(pieces)])
        if not data:
            return ""
        self._prompt_only = False
        if self._leading_spaces:
            data = self._without_leading_spaces(data, token_ids)
        if self._pending:
            data = self._pending + data
        text, num_decoded = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[num_decoded:]
        return text

    def finish(self) -> str:
        """Return the remaining text: U+FFFD for a character that will never be complete."""
        pending, self._pending = self._pending, b""
        return "" if self._prompt_only else codecs.utf_8_decode(pending, "replace", True)[0]

    def _last_bytes(self, token_ids: TokenIds) -> bytes:
        """Return the last bytes of a text, enough for any incomplete character; empty only if the whole text is."""
        data = b""
        for token_id in reversed(token_ids):
            if 0 <= token_id < len(self._pieces):
                data = self._pieces[token_id] + data
            if len(data) >= _LONGEST_CHARACTER_BYTES:
                break
        return data[-_LONGEST_CHARACTER_BYTES:]

    def _without_leading_spaces(self, data: bytes, token_ids: TokenIds) -> bytes:
        """Return the data without the spaces that the tokenizer puts before the first word; only of the first piece."""
        in_range = (token_id for token_id in token_ids if 0 <= token_id < len(self._pieces))
        first = next(piece for token_id in in_range if (piece := self._pieces[token_id]))
        num_spaces = min(self._leading_spaces, len(first) - len(first.lstrip(b" ")))
        self._leading_spaces = 0
        return data[num_spaces:]


class TextStream:
    """The text of one output.  Stop strings are not searched in thoughts.

    num_tokens: number of tokens used; with a stop string, up to the one that completed it.
    num_reasoning_tokens: number of them that belong to thoughts.
    Everything returned by ``push`` and ``finish``, joined, is the same however the tokens are grouped.
    """

    __slots__ = (
        "_detokenizer", "_matcher", "_min_tokens", "_splitter", "_thoughts", "num_reasoning_tokens", "num_tokens",
    )  # fmt: skip

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt_ids: TokenIds,
        params: SamplingParams,
        thoughts: ReasoningParser | None = None,
    ) -> None:
        """Start the text.  prompt_ids: tokens that the output continues.  thoughts: separates them from the answer."""
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self._splitter = thoughts
        self._thoughts: list[str] = []
        self._detokenizer = Detokenizer(
            vocabulary, skip_special_tokens=params.skip_special_tokens, prompt_ids=prompt_ids
        )
        self._matcher = StopMatcher(params.stop, include=params.include_stop_str_in_output) if params.stop else None
        self._min_tokens = params.min_tokens

    @property
    def matched(self) -> str | None:
        """The stop string that has ended the text; after it nothing becomes visible."""
        return self._matcher.matched if self._matcher else None

    def push(self, token_ids: TokenIds) -> str:
        """Return the text that is visible now.  A last token that must not be shown must not be pushed."""
        if self._matcher is None and self._splitter is None:
            self.num_tokens += len(token_ids)
            return self._detokenizer.push(token_ids)
        visible = []
        for token_id in token_ids:
            if self._matcher is not None and self._matcher.matched is not None:
                break
            self.num_tokens += 1
            text = self._detokenizer.push((token_id,))
            if self._splitter is not None:
                text = self._without_thoughts(self._splitter, text)
            if self._matcher is None:
                visible.append(text)
                continue
            # Text of the first min_tokens tokens is not searched: nothing may stop before them.
            visible.append(self._matcher.push(text) if self.num_tokens > self._min_tokens else text)
        return "".join(visible)

    def finish(self) -> str:
        """Return the text that was held back, since no more tokens come.  It may still hold a stop string."""
        text = self._detokenizer.finish()
        if self._splitter is not None:
            text = self._without_thoughts(self._splitter, text, more=False)
        if self._matcher is None:
            return text
        return self._matcher.push(text) + self._matcher.finish()

    def take_thoughts(self) -> str:
        """Return the thoughts since the last call."""
        thoughts = "".join(self._thoughts)
        self._thoughts.clear()
        return thoughts

    def _without_thoughts(self, splitter: ReasoningParser, text: str, *, more: bool = True) -> str:
        """Return the answer's part of a token's text; without ``more``, also the text that was held back."""
        was_inside = splitter.inside
        thoughts, answer = splitter.push(text)
        if more:
            self.num_reasoning_tokens += was_inside or splitter.inside
        else:
            rest = splitter.finish()
            thoughts, answer = thoughts + rest[0], answer + rest[1]
        if thoughts:
            self._thoughts.append(thoughts)
        return answer


Int32 = npt.NDArray[np.int32]

log = logging.getLogger(__name__)
MAX_SHOWN_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Formats:
    """The formats of a model's output other than plain text: the name of each parser, and the parser's plugin.

    tools: None if calls are not parsed.  reasoning: None if thoughts are part of the text.
    """

    tool_parser: str = ""
    tools: ToolFormat | None = None
    reasoning_parser: str = "none"
    reasoning: ReasoningFormat | None = None

    def beginning_of_form(self, thinking: Thinking) -> Thinking:
        """Return where output of a demanded form begins.  thinking: the state in which the prompt leaves the model."""
        return thinking if self.reasoning is not None and self.reasoning.constrains else "none"

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that an answer shows."""
        return (*(self.tools.markers if self.tools else ()), *(self.reasoning.markers if self.reasoning else ()))


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A conversation as token ids.  thinking: the state in which it leaves the model's thoughts.

    parts: what features read of its pictures, as in ``RequestOptions``."""

    token_ids: Int32
    thinking: Thinking
    parts: dict[str, RequestPart] = field(default_factory=dict)

    def with_parts(self, request: Tokenize) -> Tokenize:
        """Return the conversation's request with these parts."""
        if not self.parts:
            return request
        options = msgspec.structs.replace(request.options, parts=request.options.parts | self.parts)
        return msgspec.structs.replace(request, options=options)


class TextCodec:
    """Encodes and decodes for one model.  Immutable after construction, so any thread may use it.

    formats: how the model writes function calls and thoughts.  vocabulary: the bytes of every token.
    named_tokens: the text of bos_token and the like, by that name.
    """

    def __init__(
        self,
        files: TokenizerFiles | None,
        formats: Callable[[str], Formats] | None = None,
        *,
        pad_token_id: int | None = None,
        pair_template: Path | None = None,
        pictures: PictureFormat | None = None,
    ) -> None:
        """Build the codec.  files: None for a model that takes and returns token ids only.

        formats: returns the model's formats by its chat template, '' if there is none; None for no formats.
        pad_token_id: removed from the end of a prompt; None for nothing.
        pair_template: for a query and a document; None for the chat template if it knows these roles.
        pictures: the format in which the model takes them; None if it takes none.
        Raises WeightsError that names the file."""
        self._pad_token_id = pad_token_id
        self._tokenizer = files.tokenizer if files else None
        template = self._template = files.template if files else None
        self.named_tokens = files.named if files else {}
        self.formats = formats(template.source if template else "") if formats else Formats()
        self.vocabulary = Vocabulary.read(files.tokenizer, files.decoder) if files else Vocabulary([])
        own = read_template(pair_template) if pair_template else template if knows_pairs(template) else None
        self._pairs = Pairs(files.tokenizer, own) if files else None
        self._pictures = PictureText.of(pictures, files.tokenizer) if files and pictures is not None else None

    @classmethod
    def load(cls, directory: Path, formats: Callable[[str], Formats] | None = None, **more: Any) -> "TextCodec":
        """Return the codec of a checkpoint directory.  more: keywords of the constructor.

        Raises WeightsError that names the file."""
        return cls(TokenizerFiles(directory), formats, **more)

    @classmethod
    def without_tokenizer(
        cls, formats: Callable[[str], Formats] | None = None, pad_token_id: int | None = None
    ) -> "TextCodec":
        """Return a codec that takes and returns token ids only: text prompts are refused, and output has no text."""
        return cls(None, formats, pad_token_id=pad_token_id)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id that encoding can return."""
        return len(self.vocabulary)

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that the chat template knows by name."""
        return self._template.roles if self._template else ()

    @property
    def template_source(self) -> str:
        """Text of the chat template; empty if there is none."""
        return self._template.source if self._template else ""

    @cached_property
    def _chat_vocabulary(self) -> Vocabulary:
        return self.vocabulary.showing(self.formats.markers)

    def encode(self, text: str, *, add_special_tokens: bool = True, truncate_to: int = 0) -> Int32:
        """Return the token ids of a prompt, with the special tokens (BOS) that the model expects around a text.

        truncate_to: number of tokens to which a text is cut; 0 for no limit.  Raises RequestError for an empty text."""
        ids = self._encode(text, add_special_tokens=add_special_tokens, param="prompt")
        if truncate_to and len(ids) > truncate_to:
            assert self._tokenizer is not None, "a text was encoded without a tokenizer"
            ids = np.array(cut_text(self._tokenizer, text, truncate_to), dtype=np.int32)
        return ids if self._pad_token_id is None else self._without_padding(ids)

    def trimmed(self, token_ids: bytes, truncate_to: int = 0) -> Int32:
        """Return an int32 prompt of token ids without excess tokens and padding."""
        ids = np.frombuffer(token_ids, dtype=np.int32)[: truncate_to or None]
        return ids if self._pad_token_id is None else self._without_padding(ids)

    def check_known(self, token_ids: Int32, vocab_size: int, param: str) -> None:
        """Raise RequestError for a token that the tokenizer knows and the model, of ``vocab_size`` tokens, does not."""
        not_known = token_ids >= vocab_size
        if not_known.any() and len(found := token_ids[not_known & (token_ids < FIRST_ID)]):
            unknown = int(found[0])
            raise RequestError(
                f"{param}: the text has the token {self.token_text(unknown, 0.0).text!r} (id {unknown}), which "
                f"the tokenizer knows and the model does not: its token ids end at {vocab_size - 1}",
                code="unknown_token",
                param=param,
            )

    def _without_padding(self, ids: Int32) -> Int32:
        """Return the ids without padding at the end: transformers classifies by the last token that is not padding."""
        (others,) = np.nonzero(ids != self._pad_token_id)
        return ids[: others[-1] + 1] if len(others) else ids[:1]

    def encode_chat(self, turns: Sequence[ChatTurn], options: ChatOptions = PLAIN, truncate_to: int = 0) -> EncodedChat:
        """Return the token ids of a conversation up to the assistant's answer; the template adds special tokens itself.

        turns may be a query and a document (``pairs.py``).  truncate_to: as in ``encode``.
        Raises RequestError if the model has no template or the template refuses."""
        if tuple(turn.role for turn in turns) == ROLES:
            if self._pairs is None:
                raise RequestError("this model has no tokenizer, so it cannot take a query and documents as text")
            return EncodedChat(self.trimmed(self._pairs.encode(turns, truncate_to).tobytes()), "none")
        if self._template is None:
            reason = "this model has no chat template, so it cannot take messages; send a prompt instead"
            raise RequestError(reason, code="no_chat_template", param="messages")
        text = self._template.render(turns, options)
        if any(turn.pictures for turn in turns):
            token_ids, parts = self._with_pictures(text, turns)
        else:
            token_ids, parts = self._encode(text, add_special_tokens=False, param="messages"), {}
            if truncate_to or self._pad_token_id is not None:
                token_ids = self.trimmed(token_ids.tobytes(), truncate_to)
        if (reasoning := self.formats.reasoning) is None:
            return EncodedChat(token_ids, "none", parts)
        continued = turns[-1].content if options.continue_final else ""
        return EncodedChat(token_ids, reasoning.thinking_at_end(text, continued), parts)

    def _with_pictures(self, text: str, turns: Sequence[ChatTurn]) -> tuple[Int32, dict[str, RequestPart]]:
        """Return the token ids of a conversation with pictures, and the part of the request that has these.

        text: as the template renders it."""
        if self._pictures is None:
            raise RequestError("this model takes no pictures; send text alone", code="no_pictures", param="messages")
        pictures = [picture for turn in turns for picture in turn.pictures]
        text, layouts = self._pictures.spread(text, pictures)
        token_ids = self._encode(text, add_special_tokens=False, param="messages")
        token_ids, part = self._pictures.place(token_ids, pictures, layouts)
        return token_ids, {NAME: part}

    def spelt(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the token ids of their bad words, each word as it is and after a space.

        Raises RequestError (param bad_words)."""
        if not params.bad_words:
            return params
        texts = [text for word in params.bad_words for text in (word.strip(), f" {word.strip()}")]
        encoded = (self._encode(text, add_special_tokens=False, param="bad_words").tolist() for text in texts)
        return params.replace(bad_token_ids=tuple(dict.fromkeys(map(tuple, encoded))))

    def _encode(self, text: str, *, add_special_tokens: bool, param: str) -> Int32:
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer; send the prompt as token ids", param=param)
        try:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError:
            # A str that the library cannot take: it contains half of a surrogate pair.
            raise RequestError(f"{param}: not valid Unicode (lone surrogate)", param=param) from None
        if not encoding.ids:
            raise RequestError(f"{param}: empty, there is nothing to continue", param=param)
        return np.array(encoding.ids, dtype=np.int32)

    def decode(self, token_ids: TokenIds, *, skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence."""
        detokenizer = Detokenizer(self.vocabulary, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def open_stream(
        self, prompt_ids: TokenIds, params: SamplingParams, *, chat: bool = False, thinking: Thinking = "none"
    ) -> TextStream:
        """Return the stream of one request's output.  prompt_ids: tokens that it continues.

        chat: whether its text shows markers.  thinking: the state in which the prompt leaves the model."""
        reasoning = self.formats.reasoning
        parser = reasoning.parser(thinking) if reasoning is not None and thinking != "none" else None
        return TextStream(self._chat_vocabulary if chat else self.vocabulary, prompt_ids, params, parser)

    def token_text(self, token_id: int, logprob: float) -> TokenText:
        """Return the token by itself, as lists of log probabilities show it."""
        piece = self.vocabulary.piece(token_id)
        return TokenText(token_id=token_id, text=piece.decode("utf-8", "replace"), utf8=piece, logprob=logprob)


def load_codec(
    model: ModelSection,
    directory: Path,
    formats: Callable[[str], Formats] | None = None,
    use: ModelUse = GENERATING,
    pictures: PictureFormat | None = None,
) -> TextCodec:
    """Return the codec that ``model`` configures.  Raises WeightsError that names the file.

    directory: the checkpoint's.  formats, pictures: as in ``TextCodec``.  use: the model's."""
    setting, template = model.tokenizer, ScoreSettings.read(model).score_template
    dummy = model.load_format == "dummy" and not (directory / "tokenizer.json").exists()
    if setting == "none" or (dummy and not setting):
        log.info("no tokenizer: prompts and output are token ids only")
        return TextCodec.without_tokenizer(formats, use.pad_token_id)
    return TextCodec.load(
        Path(setting) if setting else directory,
        formats,
        pad_token_id=use.pad_token_id,
        pair_template=Path(template).expanduser() if template else None,
        pictures=pictures,
    )


def warn_of_unknown_tokens(codec: TextCodec, vocab_size: int) -> None:
    """Log the tokens of the tokenizer that the model does not have.  vocab_size: rows of its embedding."""
    unknown = [piece.decode("utf-8", "replace") for piece in codec.vocabulary.all_pieces[vocab_size:] if piece]
    if unknown:
        log.warning(
            "%d tokens of the tokenizer have no embedding in the model, which ends at id %d; "
            "texts with one are refused; the first: %s",
            len(unknown),
            vocab_size - 1,
            ", ".join(map(repr, unknown[:MAX_SHOWN_TOKENS])),
        )
