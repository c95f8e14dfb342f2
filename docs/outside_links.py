"""A hook of MkDocs: what pages link to outside of docs/ goes along, or becomes plain text.

Owns: links that leave docs/.  Does not know: links between pages, which MkDocs checks.
A file goes along as it is.  A folder, source code and a page of Markdown have no place on the site; readers of the
repository follow these links there.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

LINK = re.compile(r"(!?)\[([^\]]*)\]\(\.\./([^)#]+)(#[^)]*)?\)")
ROOT = Path(__file__).parents[1]
LEFT_BEHIND = (".py", ".md")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of a page; MkDocs calls this by name."""

    def rewrite(found: re.Match[str]) -> str:
        picture, text, target, _ = found.groups()
        path = ROOT / target
        if not path.is_file() or path.suffix in LEFT_BEHIND:
            return text
        if files.get_file_from_path(target) is None:
            files.append(File.generated(config, target, abs_src_path=str(path)))
        return f"{picture}[{text}]({target})"

    return LINK.sub(rewrite, markdown)
