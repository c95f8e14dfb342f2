"""The facts that must be the same in all processes of one engine.

Owns: their names and values.  Does not know: the checkpoint, which ranks compare themselves.
"""

from collections.abc import Mapping
from importlib import metadata

from engine.config import Config
from engine.workers.machines.launch import Launch


def our_facts(launch: Launch, config: Config) -> dict[str, str]:
    """The facts of this process."""
    return {
        "WORLD_SIZE": str(launch.size),
        "device.tensor_parallel": str(config.device.tensor_parallel),
        **{name: _version(name) for name in ("callboard", "torch")},
    }


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """The facts in which another process differs from the head, as a sentence; empty if there are none."""
    found = [f"{name} is {theirs.get(name, 'unknown')}, at RANK=0 {ours[name]}" for name in ours]
    return "; ".join(one for name, one in zip(ours, found, strict=True) if theirs.get(name) != ours[name])


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # a checkout that was never installed
        return "of unknown version"
