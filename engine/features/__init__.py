"""Optional parts of the engine, a folder each.

A folder may have ``settings.py``, ``fit.py``, ``planner.py``, ``rank.py`` and ``watcher.py``.
``docs/architecture.md`` describes each.
Folders are found by a search, so a feature is deleted with its folder.  The core imports none of them by name.
"""
