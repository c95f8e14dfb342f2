"""The models that are captured."""

from tests.models.conftest import cases

__all__ = ["cases"]
