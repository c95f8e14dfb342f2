"""The engine, whose public face is the package ``callboard``."""

__version__ = "0.1.0"
