"""The choice of the encoder of pictures for a checkpoint.

Owns: that choice.  Does not know: torch, what an encoder reads.
"""

import logging
from pathlib import Path
from typing import Final

from engine.checkpoints.fields import read_fields
from engine.config import Config
from engine.plugins.encoder.encoder import Encoder
from engine.plugins.encoder.kind import ENCODER
from engine.plugins.encoder.settings import EncoderChoice
from engine.plugins.hookspecs import EncoderContext
from engine.plugins.manager import PluginInfo, Plugins, checked, declared
from engine.types.errors import WeightsError

log = logging.getLogger(__name__)

EXTRA: Final = "pip install 'callboard[images]'"


def chosen_encoder(config: Config, directory: Path) -> Encoder | None:
    """Return the encoder for a checkpoint; None if it takes text alone.  directory: the checkpoint's.

    Raises PluginError; and WeightsError that names the file, for an encoder that is chosen by name."""
    name = EncoderChoice.read(config.plugins).encoder
    path = directory / "config.json"
    table = read_fields(path).table if name != "none" and path.exists() else {}
    architectures = table.get("architectures")
    if not architectures or "vision_config" not in table:
        return None
    plugins = Plugins({}, config.plugins.options)
    known = [info for info in plugins.known.values() if info.kind == ENCODER and name in (info.short, "auto")]
    found = [info for info in known if info.built_in or name != "auto"]
    infos = [info for info in found if architectures[0] in checked(info, declared(info)).architectures]
    return _built(plugins, infos[0], directory, table, is_named=name != "auto") if infos else None


def _built(
    plugins: Plugins, info: PluginInfo, directory: Path, table: dict[str, object], *, is_named: bool
) -> Encoder | None:
    missing = checked(info, declared(info)).missing_packages()
    if missing and not is_named:
        log.warning("pictures are refused: %s needs %s (%s)", info.name, " and ".join(missing), EXTRA)
        return None
    plugins.load(info.name)
    try:
        return plugins.build(info.name, EncoderContext(directory, table), Encoder)
    except WeightsError as error:
        if is_named:
            raise
        log.warning("pictures are refused: %s", error)
        return None
