"""Between text and token ids, for one model: encoding, chats, and the pieces that streams are built from.

Owns: the tokenizer, and which one a configuration means.
Does not know: open requests, event loops, what a model does with the ids.

``encode`` and ``encode_chat`` take 10 ms for a long prompt and seconds for a hostile one: call them in a worker
thread, after a bound on the number of characters.  They encode by ``encode_batch_fast``, which releases the GIL;
``encode`` of the tokenizers library holds it and would stop the event loop from another thread.
"""

import logging
from collections.abc import Sequence
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
from engine.text.reasoning import CLOSE, OPEN, Thinking, thinking_at_end
from engine.text.stream import Detokenizer, TextStream, TokenIds
from engine.text.tool_format import CALL_CLOSE, CALL_OPEN, PYTHON_TAG, ToolFormat
from engine.text.vocabulary import Vocabulary

Int32 = npt.NDArray[np.int32]

MARKERS = (OPEN, CLOSE, CALL_OPEN, CALL_CLOSE, PYTHON_TAG)  # an answer shows them, even if they are special tokens
log = logging.getLogger(__name__)
MAX_SHOWN_TOKENS = 8


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A conversation as token ids, and whether it leaves the model in the middle of its thoughts."""

    token_ids: Int32
    thinking: Thinking


class TextCodec:
    """Encodes and decodes for one model.  Immutable after construction, so any thread may use it.

    tool_format: how the model writes function calls.  thinks: whether it may think before it answers, between markers.
    vocabulary: what every token is as bytes.
    """

    def __init__(
        self, files: TokenizerFiles | None, *, tool_format: ToolFormat | None = None, thinks: bool | None = None
    ) -> None:
        """files: None for a model that takes and gives token ids only.  The others: None to go by the chat template."""
        self._tokenizer = files.tokenizer if files else None
        template = self._template = files.template if files else None
        self.tool_format: ToolFormat = tool_format or (template.tool_format if template else "hermes")
        self.thinks = template is not None and template.thinks if thinks is None else thinks
        self.vocabulary = Vocabulary.read(files.tokenizer, files.decoder) if files else Vocabulary([])

    @classmethod
    def load(cls, directory: Path, *, tool_format: ToolFormat | None = None, thinks: bool | None = None) -> "TextCodec":
        """The codec of a checkpoint directory.  Raises WeightsError that names the file."""
        return cls(TokenizerFiles(directory), tool_format=tool_format, thinks=thinks)

    @classmethod
    def without_tokenizer(cls) -> "TextCodec":
        """A codec that takes and gives token ids only: it refuses text prompts, and output has no text."""
        return cls(None)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id that encoding can give."""
        return len(self.vocabulary)

    @cached_property
    def _chat_vocabulary(self) -> Vocabulary:
        return self.vocabulary.showing(MARKERS)

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
        return EncodedChat(token_ids, thinking_at_end(text) if self.thinks else "none")

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
        """The stream of one request's output.  prompt_ids: what it continues.  chat: its text shows ``MARKERS``."""
        return TextStream(self._chat_vocabulary if chat else self.vocabulary, prompt_ids, params, thinking)

    def token_text(self, token_id: int, logprob: float) -> TokenText:
        """The token by itself, as lists of log probabilities show it."""
        piece = self.vocabulary.piece(token_id)
        return TokenText(token_id=token_id, text=piece.decode("utf-8", "replace"), utf8=piece, logprob=logprob)


def load_codec(model: ModelSection, directory: Path) -> TextCodec:
    """The codec that ``model`` asks for.  directory: the checkpoint's.  Raises WeightsError that names the file."""
    setting = model.tokenizer
    dummy = model.load_format == "dummy" and not (directory / "tokenizer.json").exists()
    if setting == "none" or (dummy and not setting):
        log.info("no tokenizer: prompts and output are token ids only")
        return TextCodec.without_tokenizer()
    return TextCodec.load(
        Path(setting) if setting else directory,
        tool_format=None if model.tool_format == "auto" else model.tool_format,
        thinks=None if model.reasoning == "auto" else model.reasoning == "yes",
    )


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
