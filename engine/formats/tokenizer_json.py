"""A tokenizer as files in Hugging Face format: python -m engine.formats.tokenizer_json SOURCE DIRECTORY

SOURCE is a checkpoint whose tokenizer is in another format.

Owns: the call of transformers that converts it.  Does not know: weights.
"""

import sys
from pathlib import Path

from transformers import AutoTokenizer


def main(source: Path, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template of ``source`` into ``directory``."""
    try:
        # By default, transformers prompts on the terminal whether to run code that a checkpoint contains.
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        sys.exit("it needs code of its own, which is not run")
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
