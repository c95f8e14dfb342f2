"""A check that ``engine`` and ``server`` are callboard's own, not others of that name next to a script.

Owns: the check and its error.  Does not know: their contents.
"""

from importlib.util import find_spec
from pathlib import Path

OWN = ("engine", "server")


def refuse_shadows() -> None:
    """Raise ImportError if another package or module would be imported in place of one of ours."""
    home = Path(__file__).resolve().parents[1]
    for name in OWN:
        spec = find_spec(name)
        found = Path(spec.origin).resolve() if spec and spec.origin else None
        if found != home / name / "__init__.py":
            raise ImportError(
                f"callboard needs its own package {name!r}, which is in {home}, but Python finds {found or 'none'} "
                "first: rename that, or run from a folder that does not hold it"
            )
