"""Optional parts of the engine, a folder each.

A folder may have ``planner.py``, whose ``planner_feature`` returns a ``PlannerFeature`` (``engine/scheduling``).
Folders are found by a search, so a feature is deleted with its folder.  The core imports none of them by name.
"""
