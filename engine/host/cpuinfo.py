"""The file /proc/cpuinfo, in which Linux describes the CPUs of a machine.

Owns: reading the first CPU's entries.  Does not know: what they mean.
"""

from pathlib import Path


def cpu_entry(*names: str, root: Path = Path("/")) -> str:
    """Return the first entry with one of these names, or '' if there is none.  root: the directory that has /proc."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    entries = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in entries if name.strip() in names), "")
