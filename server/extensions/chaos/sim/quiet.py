"""The state of the engine's books when nothing runs: nothing may be held then.

Owns: that comparison.  Does not know: when an engine is quiet.  Raises SimIncorrect.
"""

import msgspec

from server.extensions.chaos.sim import probe
from server.extensions.chaos.sim.assembly import Engine
from server.extensions.chaos.sim.checks import Checks
from server.extensions.chaos.sim.failures import SimIncorrect
from server.extensions.chaos.sim.probe import Probe


def check_quiet(engine: Engine, planner_probe: Probe, checks: Checks) -> None:
    """Check the books, and that ingress has the same figures."""
    check_books(engine, planner_probe, checks)
    known, stats = engine.ingress.stats, planner_probe.planner.stats()
    if known is None or msgspec.structs.replace(known, step_id=stats.step_id) != stats:
        raise SimIncorrect(f"ingress has {known}, the scheduler {stats}")


def check_books(engine: Engine, planner_probe: Probe, checks: Checks) -> None:
    """No request runs, every page is free or cached, nothing is locked, no request is remembered."""
    checks.check_books(planner_probe)
    stats = planner_probe.planner.stats()
    if (stats.running, stats.waiting, stats.pages_used) != (0, 0, 0):
        raise SimIncorrect(f"all requests have ended, and {stats}")
    if stats.pages_free + stats.pages_cached != planner_probe.num_pages:
        raise SimIncorrect(f"of {planner_probe.num_pages} pages: {stats}")
    if planner_probe.num_protected or planner_probe.num_rows_held:
        raise SimIncorrect(f"{planner_probe.num_protected} pages locked, {planner_probe.num_rows_held} rows held")
    if planner_probe.num_states_held:
        raise SimIncorrect(f"all requests have ended, and rows hold {planner_probe.num_states_held} states")
    if planner_probe.num_fetches:
        raise SimIncorrect(f"{planner_probe.num_fetches} requests that have ended have pages of the store")
    if probe.num_texts(engine.tokenizer):
        raise SimIncorrect(f"the tokenizer still knows {probe.num_texts(engine.tokenizer)} requests")
    checks.check_metrics()
