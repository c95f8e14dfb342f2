"""Which tokenizer a configuration means.

Owns: where it is looked for, and when there is none.  Does not know: what it is used for.
"""

import logging
from pathlib import Path

from engine.config import ModelSection
from engine.text.codec import TextCodec

log = logging.getLogger(__name__)


def load_codec(model: ModelSection, directory: Path) -> TextCodec:
    """directory: of the checkpoint.  Raises WeightsError that names the file."""
    setting = model.tokenizer
    dummy = model.load_format == "dummy" and not (directory / "tokenizer.json").exists()
    if setting == "none" or (dummy and not setting):
        log.info("no tokenizer: prompts and output are token ids only")
        return TextCodec.without_tokenizer()
    return TextCodec.load(
        Path(setting) if setting else directory,
        tool_format=None if model.tool_format == "auto" else model.tool_format,
        thinks=None if model.thinks == "auto" else model.thinks == "yes",
    )
