"""Between text and token ids, for one model: prompts and chats on the way in, each output's text on the way out.

Owns: the tokenizer, and which one a configuration means; the bytes of a character that is not complete yet, and how
many tokens the visible text of an output took.
Does not know: messages, open requests, event loops, what a model does with the ids, why a request ends.

An output becomes visible in three steps: it is detokenised, told apart from thoughts, cut at a stop string.
Detokenising costs 0.5 us a token on one core when pushed one by one, 0.04 us in large groups.

``encode`` and ``encode_chat`` take 10 ms for a long prompt and seconds for a hostile one: call them in a worker
thread, after a bound on the number of characters.  They encode by ``encode_batch_fast``, which releases the GIL;
``encode`` of the tokenizers library holds it and would stop the event loop from another thread.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.errors import RequestError
from engine.messages import ChatOptions, ChatTurn, TokenText
from engine.params import SamplingParams
from engine.sections import ModelSection
from engine.text.chat import PLAIN
from engine.text.files import TokenizerFiles
from engine.text.reasoning import ReasoningFormat, Thinking
from engine.text.stream import Detokenizer, TextStream, TokenIds
from engine.text.tool_calls import ToolFormat
from engine.text.vocabulary import Vocabulary

Int32 = npt.NDArray[np.int32]

log = logging.getLogger(__name__)
MAX_SHOWN_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Formats:
    """How a model writes what is no plain text.  Of each: the name of its parser, and the parser's plugin.

    tools: None for a model whose calls nobody looks for.  reasoning: None for one whose thoughts are text.
    """

    tool_parser: str = ""
    tools: ToolFormat | None = None
    reasoning_parser: str = "none"
    reasoning: ReasoningFormat | None = None

    def thinking_of_grammar(self, thinking: Thinking) -> Thinking:
        """Where a grammar's output begins.  thinking: where the prompt leaves the model."""
        return thinking if self.reasoning is not None and self.reasoning.constrains else "none"

    @property
    def markers(self) -> tuple[str, ...]:
        """What an answer shows, even if it is a special token."""
        return (*(self.tools.markers if self.tools else ()), *(self.reasoning.markers if self.reasoning else ()))


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A conversation as token ids, and whether it leaves the model in the middle of its thoughts."""

    token_ids: Int32
    thinking: Thinking


class TextCodec:
    """Encodes and decodes for one model.  Immutable after construction, so any thread may use it.

    formats: how the model writes function calls and thoughts.  vocabulary: what every token is as bytes.
    """

    def __init__(self, files: TokenizerFiles | None, formats: Callable[[str], Formats] | None = None) -> None:
        """files: None for a model that takes and gives token ids only.

        formats: tells the model's by its chat template, which is empty where there is none; None for no formats."""
        self._tokenizer = files.tokenizer if files else None
        template = self._template = files.template if files else None
        self.formats = formats(template.source if template else "") if formats else Formats()
        self.vocabulary = Vocabulary.read(files.tokenizer, files.decoder) if files else Vocabulary([])

    @classmethod
    def load(cls, directory: Path, formats: Callable[[str], Formats] | None = None) -> "TextCodec":
        """The codec of a checkpoint directory.  Raises WeightsError that names the file."""
        return cls(TokenizerFiles(directory), formats)

    @classmethod
    def without_tokenizer(cls, formats: Callable[[str], Formats] | None = None) -> "TextCodec":
        """A codec that takes and gives token ids only: it refuses text prompts, and output has no text."""
        return cls(None, formats)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id that encoding can give."""
        return len(self.vocabulary)

    @cached_property
    def _chat_vocabulary(self) -> Vocabulary:
        return self.vocabulary.showing(self.formats.markers)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Int32:
        """The token ids of a prompt, with the special tokens (BOS) that the model expects around a text.

        Raises RequestError if there is nothing to encode."""
        return self._encode(text, add_special_tokens=add_special_tokens, param="prompt")

    def encode_chat(self, turns: Sequence[ChatTurn], options: ChatOptions = PLAIN) -> EncodedChat:
        """The token ids of a conversation up to the assistant's answer; the template writes its special tokens itself.

        Raises RequestError if the model has no template or the template refuses."""
        if self._template is None:
            raise RequestError(
                "this model has no chat template, so it cannot take messages; send a prompt instead",
                code="no_chat_template",
                param="messages",
            )
        text = self._template.render(turns, options)
        token_ids = self._encode(text, add_special_tokens=False, param="messages")
        if (reasoning := self.formats.reasoning) is None:
            return EncodedChat(token_ids, "none")
        continued = turns[-1].content if options.continue_final else ""
        return EncodedChat(token_ids, reasoning.thinking_at_end(text, continued))

    def _encode(self, text: str, *, add_special_tokens: bool, param: str) -> Int32:
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer; send the prompt as token ids", param=param)
        try:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError:
            # A str that the library cannot take: half of a surrogate pair, which is no character.
            raise RequestError(f"{param}: not valid Unicode (lone surrogate)", param=param) from None
        if not encoding.ids:
            raise RequestError(f"{param}: empty, there is nothing to continue", param=param)
        return np.array(encoding.ids, dtype=np.int32)

    def decode(self, token_ids: TokenIds, *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence."""
        detokenizer = Detokenizer(self.vocabulary, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def open_stream(
        self, prompt_ids: TokenIds, params: SamplingParams, *, chat: bool = False, thinking: Thinking = "none"
    ) -> TextStream:
        """The stream of one request's output.  prompt_ids: what it continues.  chat: its text shows markers.
        thinking: where the prompt leaves the model."""
        reasoning = self.formats.reasoning
        parser = reasoning.parser(thinking) if reasoning is not None and thinking != "none" else None
        return TextStream(self._chat_vocabulary if chat else self.vocabulary, prompt_ids, params, parser)

    def token_text(self, token_id: int, logprob: float) -> TokenText:
        """The token by itself, as lists of log probabilities show it."""
        piece = self.vocabulary.piece(token_id)
        return TokenText(token_id=token_id, text=piece.decode("utf-8", "replace"), utf8=piece, logprob=logprob)


def load_codec(model: ModelSection, directory: Path, formats: Callable[[str], Formats] | None = None) -> TextCodec:
    """The codec that ``model`` asks for.  directory: the checkpoint's.  formats: as ``TextCodec`` takes it.

    Raises WeightsError that names the file."""
    setting = model.tokenizer
    dummy = model.load_format == "dummy" and not (directory / "tokenizer.json").exists()
    if setting == "none" or (dummy and not setting):
        log.info("no tokenizer: prompts and output are token ids only")
        return TextCodec.without_tokenizer(formats)
    return TextCodec.load(Path(setting) if setting else directory, formats)


def warn_of_unknown_tokens(codec: TextCodec, vocab_size: int) -> None:
    """Log which tokens a text may have and the model does not.  vocab_size: rows of its embedding."""
    unknown = [piece.decode("utf-8", "replace") for piece in codec.vocabulary.all_pieces[vocab_size:] if piece]
    if unknown:
        log.warning(
            "%d tokens of the tokenizer have no embedding in the model, which ends at id %d; "
            "texts with one are refused; the first: %s",
            len(unknown),
            vocab_size - 1,
            ", ".join(map(repr, unknown[:MAX_SHOWN_TOKENS])),
        )
