"""A JSON object of a checkpoint, read field by field, with errors that name the file.

Owns: reading and checking one value at a time.  Does not know: which fields a model has, torch.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from engine.types.errors import WeightsError

MAX_JSON_BYTES = 16 << 20
LARGEST_INTEGER = 1 << 31
LARGEST = sys.float_info.max  # a JSON integer may be larger, and then is not a float

T = TypeVar("T")


class Fields:
    """Typed access to a decoded JSON object.  A null counts as missing, since Hugging Face writes unset fields so."""

    def __init__(self, table: dict[str, Any], origin: str) -> None:
        self.table = table
        self.origin = origin

    def has(self, name: str) -> bool:
        """Return whether the field is there and not null."""
        return self.table.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Return whether the field is null, not missing; for some fields null means none instead of the default."""
        return name in self.table and self.table[name] is None

    def integer(self, name: str, default: int | None = None, minimum: int = 1, maximum: int = LARGEST_INTEGER) -> int:
        """Return a whole number; required if there is no default."""
        value = self._value(name, default, "a whole number")
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.error(name, value, f"a whole number from {minimum} to {maximum}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number above zero; required if there is no default."""
        value = self._value(name, default, "a positive number")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST:
            raise self.error(name, value, "a positive number")
        return float(value)

    def nullable(self, name: str, default: float) -> float:
        """Return a finite number above zero; 0 for a null, the default for a missing field."""
        return default if name not in self.table else 0.0 if self.is_null(name) else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        return self._instance(bool, name, default, "true or false")

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string; required if there is no default."""
        return self._instance(str, name, default, "a string")

    def choice(self, name: str, default: str | None, allowed: Iterable[str]) -> str:
        """Return one of the allowed strings."""
        value, allowed = self.text(name, default), tuple(allowed)
        if value not in allowed:
            raise self.error(name, value, f"one of {', '.join(allowed)}")
        return value

    def demand(self, name: str, only: bool, why: str) -> None:
        """Check a flag of which only one value, also the default, is served."""
        if self.flag(name, only) != only:
            raise self.error(name, not only, f"{str(only).lower()}: {why}")

    def integers(self, name: str) -> tuple[int, ...]:
        """Return the numbers of a field with a whole number or a list of them; empty if missing."""
        value = self.table.get(name)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in values):
            raise self.error(name, value, "a whole number or a list of whole numbers")
        return tuple(values)

    def with_defaults(self, **defaults: Any) -> "Fields":
        """Return the fields with a family's own values in place of missing ones."""
        missing = {name: value for name, value in defaults.items() if not self.has(name)}
        return Fields({**self.table, **missing}, self.origin)

    def section(self, name: str) -> "Fields":
        """Return a nested object; empty if missing."""
        value = self.table.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, value, "an object")
        return Fields(value or {}, f"{self.origin}: {name}")

    def error(self, name: str, value: object, expected: str) -> WeightsError:
        """Return the error for a field whose value is not as expected."""
        shown = json.dumps(value) if value is None or isinstance(value, str | int | float | list | dict) else str(value)
        return WeightsError(f"{self.origin}: {name} is {shown[:80]}, expected {expected}")

    def _instance(self, kind: type[T], name: str, default: T | None, expected: str) -> T:
        value = self._value(name, default, expected)
        if not isinstance(value, kind):
            raise self.error(name, value, expected)
        return value

    def _value(self, name: str, default: object, expected: str) -> object:
        value = self.table.get(name)
        if value is None and default is None:
            raise WeightsError(f"{self.origin}: {name} is missing, expected {expected}")
        return default if value is None else value


def read_fields(path: Path) -> Fields:
    """Decode a JSON file that must hold an object.  Raises WeightsError naming the file."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise WeightsError(f"{path}: larger than {MAX_JSON_BYTES} bytes, expected a small JSON object")
        table = json.loads(path.read_bytes().decode())
    except FileNotFoundError:
        raise WeightsError(f"{path}: no such file; a checkpoint directory in Hugging Face format holds one") from None
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(table, dict):
        raise WeightsError(f"{path}: holds {type(table).__name__}, expected a JSON object")
    return Fields(table, str(path))
