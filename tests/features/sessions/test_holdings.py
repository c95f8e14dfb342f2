"""The pages under leases of the sessions that are asked for."""

from engine.features.sessions.holdings import Holding, SessionHoldings, asked_for, holdings_in
from engine.features.sessions.leases import SessionKey
from engine.features.sessions.planner import NAME, session_part
from tests.features.sessions.test_planner import Planned
from tests.scheduling.bench import lose_the_device


class Watched(Planned):
    """A planner with sessions, and the watcher of what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.holdings = SessionHoldings()
        self.bench.planner._events.install([self.bench.planner.requests.meter, self.bench.timelines, self.holdings])

    def held(self, *sessions: str) -> list[Holding]:
        keys = [SessionKey("one", session_part(name).digest) for name in sessions]
        argument = asked_for(keys)[NAME]
        return holdings_in({NAME: self.holdings.view(argument, self.bench.planner.requests, self.bench.now)})


def test_sessions_that_are_asked_for_are_shown_and_no_others() -> None:
    watched = Watched()
    for number, name in enumerate("ab"):
        watched.ask(number, name, client="one")
    assert watched.held("b", "unknown") == [Holding("one", session_part("b").digest, 4, 60.0)]
    assert watched.held() == []
    watched.bench.now = 61.0
    assert watched.held("a", "b") == []


def test_new_executors_have_an_empty_cache_and_no_leases() -> None:
    watched = Watched()
    watched.ask(0, "a", client="one")
    watched.admit(1, "b", client="one")
    watched.bench.plan()
    lose_the_device(watched.bench, is_fault=False)
    assert watched.held("a", "b") == []
    assert watched.num_leased == 0
    watched.bench.finish()
    assert [one.num_pages for one in watched.held("a", "b")] == [4], "what was running gets its lease in the end"
    watched.bench.now = 5.0
    watched.ask(2, "a", client="one")
    assert watched.feature._leases._pauses.sorted == [5.0], "the session's pause is known"
