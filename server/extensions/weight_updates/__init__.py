"""Weights that operators change, and pauses, as a part of the server."""
