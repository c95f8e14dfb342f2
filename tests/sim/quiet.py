"""When nothing runs, nothing may be held: what the engine's books must say then.

Owns: that comparison.  Does not know: when an engine is quiet.  Raises SimIncorrect.
"""

import msgspec

from tests.sim import probe
from tests.sim.assembly import Engine
from tests.sim.checks import Checks
from tests.sim.failures import SimIncorrect
from tests.sim.probe import Probe


def check_quiet(engine: Engine, planner_probe: Probe, checks: Checks) -> None:
    """The books are right, and clients would be told so."""
    check_books(engine, planner_probe, checks)
    told, stats = engine.ingress.stats, planner_probe.planner.stats()
    if told is None or msgspec.structs.replace(told, step_id=stats.step_id) != stats:
        raise SimIncorrect(f"ingress has {told}, the scheduler {stats}")


def check_books(engine: Engine, planner_probe: Probe, checks: Checks) -> None:
    """No request runs, every page is free or cached, nothing is locked, nobody is remembered."""
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
