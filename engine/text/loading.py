"""Which tokenizer a configuration means.

Owns: where it is looked for, and when there is none.  Does not know: what it is used for.
"""

import logging
from pathlib import Path

from engine.sections import ModelSection
from engine.text.codec import TextCodec

log = logging.getLogger(__name__)

MAX_SHOWN_TOKENS = 8


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
