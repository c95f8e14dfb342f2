"""A tokenizer as files in Hugging Face format: python -m engine.formats.tokenizer_json SOURCE DIRECTORY

SOURCE is a GGUF file, or a checkpoint whose tokenizer is in another format.

Owns: asking transformers for it.  Does not know: weights.
"""

import sys
from pathlib import Path

from transformers import AutoTokenizer


def main(source: Path, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template of ``source`` into ``directory``."""
    if source.is_file():
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(directory)
    else:
        AutoTokenizer.from_pretrained(source, local_files_only=True).save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
