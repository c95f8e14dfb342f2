"""The tokenizer of a GGUF file as files in Hugging Face format: python -m engine.formats.gguf_tokenizer FILE DIRECTORY

Owns: asking transformers for it.  Does not know: weights.
"""

import sys
from pathlib import Path

from transformers import AutoTokenizer


def main(path: Path, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template of ``path`` into ``directory``."""
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
