"""The adapters that are served, and their names: those that lie below the configured folder, as operators load them.

Owns: the names.  Does not know: HTTP, what is in an adapter, which of them executors hold.
A request takes its adapter along, by its content: unloading a name, or loading other files under it, changes nothing
for requests that are open, and executors need to know of neither.
"""

import asyncio
import logging
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path

from engine.features.lora.files import CONFIG, Adapter, AdapterRules, read_adapter
from engine.types.errors import FieldError, RequestError, WeightsError
from server.variant import ServedVariant

log = logging.getLogger(__name__)

MAX_NAMES = 4096
MAX_NAME_CHARS = 256


def adapters_below(rules: AdapterRules, model: str) -> dict[str, ServedVariant]:
    """Returns what each folder in the adapters' folder holds, by its name; what cannot be served is left out, and
    logged.

    model: the name that none of them may have."""
    found = {}
    for path in sorted(Path(rules.folder).iterdir())[:MAX_NAMES]:
        if (path / CONFIG).is_file():
            try:
                if not path.name.isprintable():
                    raise WeightsError("its name is not of printable characters; rename the folder")
                if path.name == model:
                    raise WeightsError("that is the model's own name; set model.name, or rename the folder")
                found[path.name] = _variant(read_adapter(path.resolve(), rules))
            except WeightsError as error:
                log.warning("adapter %a is not served: %s", path.name, error)
    return found


def _variant(adapter: Adapter) -> ServedVariant:
    return ServedVariant(created=int(time.time()), parts=adapter.parts)


class Adapters:
    """The names of a server's adapters.

    rules: None if no adapters are served.  served: name -> adapter, which changes as operators load and unload them.
    model: the name that none of them may have.  changed: called after each change."""

    def __init__(
        self,
        rules: AdapterRules | None,
        served: MutableMapping[str, ServedVariant],
        model: str,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.served = served
        self._rules = rules
        self._model = model
        self._changed = changed

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Serve what lies at ``path``, absolute or below the folder.

        in_place: also if the name is taken, by what others get no more then.  Raises RequestError: 400, 404."""
        rules = self._checked()
        self._check_name(name, in_place)
        try:
            folder = (Path(rules.folder) / path).resolve()
        except (OSError, RuntimeError, ValueError):  # a link to itself, a zero byte
            folder = Path("/")
        if not folder.is_relative_to(rules.folder):
            raise FieldError("lora_path", f"{path[:200]!r} is not below lora.folder, where adapters have to be")
        try:
            adapter = await asyncio.to_thread(read_adapter, folder, rules)
        except WeightsError as error:
            raise RequestError(str(error), code="invalid_adapter", param="lora_path") from None
        self._check_name(name, in_place)  # time has passed
        self.served[name] = _variant(adapter)
        log.info("adapter %s: %s (%s)", name, folder, adapter.digest[:12])
        self._changed()

    def unload(self, name: str) -> None:
        """Serve it no more; requests that are open go on.  Raises RequestError: 404."""
        self._checked()
        if self.served.pop(name, None) is None:
            raise RequestError(
                f"there is no adapter {name[:100]!r}", status=404, code="adapter_not_found", param="lora_name"
            )
        log.info("adapter %s is unloaded", name)
        self._changed()

    def _checked(self) -> AdapterRules:
        if self._rules is None:
            reason = "no adapters are served here; an operator can set lora.folder"
            raise RequestError(reason, status=404, code="adapters_off")
        return self._rules

    def _check_name(self, name: str, in_place: bool) -> None:
        if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
            raise FieldError("lora_name", f"expected 1 to {MAX_NAME_CHARS} printable characters")
        if name == self._model:
            raise FieldError("lora_name", f"{name!r} is the model's own name")
        if name in self.served and not in_place:
            raise FieldError("lora_name", f"{name!r} is loaded already; unload it first, or send load_inplace")
        if name not in self.served and len(self.served) >= MAX_NAMES:
            raise FieldError("lora_name", f"{MAX_NAMES} adapters are loaded already; unload one first")
