"""What a logits processor plugin must do, and what requests say of those that were chosen.

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
    """The rows of a step that asked for a processor.

    Legend: n rows · L the longest's tokens
    params: of each row, an instance of the processor's ``params``.
    token_ids_nL: int32, prompt and output so far; behind a row's own end stands anything, also ids of others' tokens.
    lengths_n: int64, how many of them there are.  num_prompt_n: int64, how many of those are the prompt.
    Both are on the logits' device; host_lengths_n has the lengths on the host.
    upload: brings an array there, for parameters of rows, without waiting for the device."""

    params: tuple[Any, ...]
    token_ids_nL: "Tensor"
    lengths_n: "Tensor"
    num_prompt_n: "Tensor"
    host_lengths_n: npt.NDArray[np.int64]
    upload: Callable[[npt.NDArray[Any]], "Tensor"]


@runtime_checkable
class LogitsProcessor(Protocol):
    """Changes the logits of requests that ask for it, before penalties, temperature and cuts."""

    @property
    def params(self) -> type[msgspec.Struct]:
        """What a request may say: fields with their types, ranges and defaults; others are the client's mistake."""
        ...

    def process(self, logits_nV: "Tensor", rows: LogitsRows) -> "Tensor":
        """Return what to pick the next tokens from; logits_nV is a copy, and may be changed and returned.

        float32; shape and device stay.  -inf rules a token out.  A row's result depends on its logits, tokens and
        parameters alone: a request may lose its row and come back.  All ranks must come to the same.  It must not wait
        for the device.
        Imports of torch belong inside of it: processes that only read requests have the plugin as well.
        If it raises, or a row's maximum is not finite, these requests end with an error: 400 for -inf, else 500."""
        ...


class Processors:
    """Those that the configuration names, by the name that requests use."""

    def __init__(self, by_name: Mapping[str, LogitsProcessor]) -> None:
        self.by_name = by_name

    def read(self, wanted: Mapping[str, str]) -> dict[str, msgspec.Struct]:
        """Return the parameters of each processor that a request names, in the configuration's order.  wanted: as JSON.

        Raises RequestError (400) for one that is not there and for parameters that it does not take."""
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
