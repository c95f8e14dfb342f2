"""New interpreters that import what this one does, and nothing from the working directory.

Owns: the command and the path of imports.  Does not know: which modules are run.
"""

import os
import sys

SAFE = "-P"  # otherwise a folder of the working directory that is named as a package of ours is imported in its place


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module; it needs ``import_path`` as its PYTHONPATH."""
    return [sys.executable, SAFE, "-m", module, *arguments]


def import_path() -> dict[str, str]:
    """Return the variable of the environment by which a new interpreter finds what this one imports."""
    return {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
