"""The configuration that a command line asks for.

Owns: which argument is a file, which is a model.  Does not know: arguments of one command alone.
"""

import argparse
import json
from pathlib import Path

from engine.checkpoints.shards import PICKLED
from engine.config import Config, ConfigSource, load_config
from engine.types.errors import ConfigError

OF_CHECKPOINTS = (".safetensors", ".json", *PICKLED)  # ends of files that are no configuration, and no model alone


def read_source(parsed: argparse.Namespace, *overrides: str) -> ConfigSource:
    """Returns the source of the configuration that the command line asks for.  Raises ConfigError."""
    files: list[str] = []
    models: list[str] = []
    for given in (parsed.target, parsed.model):
        if given is not None:
            if Path(given).suffix in OF_CHECKPOINTS and Path(given).is_file():
                raise ConfigError(f"{given}: is one file of a checkpoint; name its directory: {Path(given).parent}")
            (files if is_configuration(given) else models).append(given)
    for what, found in (("configurations", files), ("models", models)):
        if len(found) > 1:
            raise ConfigError(f"two {what} are given, {found[0]} and {found[1]}; name one of them")
    model = [f"model.path={json.dumps(models[0])}"] if models else []
    return ConfigSource(Path(files[0]) if files else None, (*model, *parsed.set, *overrides))


def read_configuration(parsed: argparse.Namespace, *overrides: str) -> Config:
    """Returns the configuration that the command line asks for.  Raises ConfigError."""
    source = read_source(parsed, *overrides)
    if parsed.takes_arrays:
        from server.run.extension import find_extensions  # most commands need no extension

        for part in find_extensions():
            if (config := part.configuration(source.path, source.overrides)) is not None:
                return config
    return load_config(source.path, source.overrides)


def is_configuration(given: str) -> bool:
    """Whether it is no model: a .toml file, there or not, or whatever else that can be read and is no .gguf."""
    path = Path(given)
    return path.suffix == ".toml" or (path.exists() and not path.is_dir() and path.suffix != ".gguf")
