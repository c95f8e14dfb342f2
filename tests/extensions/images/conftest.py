"""The fixtures that tests of pictures share with those of the server."""

from tests.server.conftest import storage

__all__ = ["storage"]
