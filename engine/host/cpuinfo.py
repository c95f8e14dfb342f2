"""The file /proc/cpuinfo, in which Linux describes the CPUs of a machine.

Owns: reading the first CPU's entries.  Does not know: what they mean.
"""

from pathlib import Path


def cpu_entry(*names: str) -> str:
    """Return the first entry with one of these names, or '' if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    entries = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in entries if name.strip() in names), "")
