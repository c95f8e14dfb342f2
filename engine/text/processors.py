"""The protocol of logits processor plugins, and the parameters that requests pass to them.

Owns: the protocols, reading a request's parameters.  Does not know: torch, devices, how a token is picked.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from engine.types.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

FIELD = "logits_processors"


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """The rows of a step that use a processor.

    Legend: n rows · L tokens of the longest row
    params: for each row an instance of the processor's ``params``.
    token_ids_nL: int32, prompt and output so far; after a row's own end its content is undefined.
    lengths_n: int64, number of those tokens.  num_prompt_n: int64, number of them in the prompt.
    Both are on the logits' device; host_lengths_n has the lengths on the host.
    upload: copies an array there, e.g. parameters of rows, without waiting for the device."""

    params: tuple[Any, ...]
    token_ids_nL: "Tensor"
    lengths_n: "Tensor"
    num_prompt_n: "Tensor"
    host_lengths_n: npt.NDArray[np.int64]
    upload: Callable[[npt.NDArray[Any]], "Tensor"]


@runtime_checkable
class LogitsProcessor(Protocol):
    """Changes the logits of requests that name it, before penalties, temperature and cuts."""

    @property
    def params(self) -> type[msgspec.Struct]:
        """Parameters of a request: fields with their types, ranges and defaults; others are the client's mistake."""
        ...

    def process(self, logits_nV: "Tensor", rows: LogitsRows) -> "Tensor":
        """Return the logits to pick the next tokens from.  logits_nV is a copy, and may be changed and returned.

        It is float32; shape and device stay.  -inf excludes a token.  A row's result must depend on its logits, tokens
        and parameters alone, as a request may lose its row and return, and must be the same on all ranks.  It must not
        wait for the device.
        Import torch inside of it: processes that only read requests load the plugin as well.
        If it raises, or a row's maximum is not finite, these requests end with an error: 400 for -inf, else 500."""
        ...


class Processors:
    """The processors that the configuration names, by the name that requests use."""

    def __init__(self, by_name: Mapping[str, LogitsProcessor]) -> None:
        self.by_name = by_name

    def read(self, wanted: Mapping[str, str]) -> dict[str, msgspec.Struct]:
        """Return the parameters of each processor that a request names, in the configuration's order.  wanted: JSON.

        Raises RequestError (400) for an unknown processor and for parameters that it does not take."""
        if unknown := wanted.keys() - self.by_name.keys():
            there = ", ".join(self.by_name) or "none"
            raise _refused(f"there is no {min(unknown)!r} here; plugins.logits_processors names: {there}")
        return {name: self._params(name, wanted[name]) for name in self.by_name if name in wanted}

    def _params(self, name: str, table: str) -> msgspec.Struct:
        kind = self.by_name[name].params
        try:
            return msgspec.json.decode(table, type=kind)
        except msgspec.DecodeError as error:
            raise _refused(f"{name}: {error}; it takes: {', '.join(kind.__struct_fields__) or 'nothing'}") from None


def _refused(reason: str) -> RequestError:
    return RequestError(f"{FIELD}: {reason}", param=FIELD)
