"""Several models as a part of the command: ``callboard serve`` with a configuration that has [[models]]."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from engine.config import Config
from server.extensions.models.configuration import SeveralModels, read_several
from server.run.extension import Extension, Serving


class ModelsExtension(Extension):
    """A front that loads and unloads models."""

    def configuration(self, path: Path | None, overrides: Sequence[str]) -> Config | None:
        return read_several(path, overrides)

    def serving(self, parsed: argparse.Namespace, config: Config) -> Serving | None:
        if not isinstance(config, SeveralModels):
            return None
        from server.extensions.models.front import serve_several

        configs = (config, *(one.config for one in config.models))
        return Serving(lambda: serve_several(config), "several models", configs)


EXTENSION = ModelsExtension()
