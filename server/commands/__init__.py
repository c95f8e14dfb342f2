"""Subcommands of ``callboard``, a module each: ``server.cli`` imports the one that is asked for."""
