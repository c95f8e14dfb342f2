"""Sessions in the real planner: a prefix outlives its pause, and everything still ends and is freed."""

import pytest

from benchmarks.agent_traffic import head, traffic
from engine.features.sessions.leases import Leases
from engine.features.sessions.planner import NAME, SessionsPlanner, session_part, ttl_of
from engine.features.traffic.sizes import StepSize
from engine.features.traffic.trace import DIGEST_BYTES
from engine.messages import Admit
from engine.plugins.eviction.lease import LeaseOptions, leased
from engine.scheduling.feature import PlannerParts
from engine.types.params import SamplingParams
from engine.types.prompt import Origin, RequestPart
from server.extensions.whatif.changes import changed
from server.extensions.whatif.replay import Replayed, TraceReplay, stand_ins
from tests.kv.test_eviction import Shelf
from tests.scheduling.bench import Bench, prompt_of


def test_a_leased_prefix_goes_as_if_it_had_been_used_at_the_end_of_its_lease() -> None:
    shelf = Shelf("lease")
    shelf.put("abcd")
    shelf.hit("a", priority=leased(shelf.tree.now + 3))
    shelf.hit("bc")
    shelf.hit("d")
    assert shelf.order() == "bacd"


def test_without_leases_it_is_lru_whatever_priorities_say() -> None:
    shelf = Shelf("lease")
    shelf.put("abcd")
    shelf.hit("a", priority=-(1 << 31))
    shelf.hit("b", priority=1 << 31)
    assert shelf.order() == "cdab"


def test_a_lease_goes_over_to_what_comes_before_when_the_end_is_evicted() -> None:
    shelf = Shelf("lease")
    shelf.put("ab")
    shelf.hit("a", priority=leased(50))
    shelf.put("c")
    shelf.tree.evict(6)  # all of b, and half of c
    shelf.hit("c")
    assert shelf.order(1) == "ccaaaa"


def seconds(size: StepSize) -> float:
    return 0.01 + 5e-5 * (size.decodes + size.prefill_tokens)


def replayed(strategy: str, num_pages: int) -> Replayed:
    requests = traffic(3, num_sessions=8, per_minute=4.0, singles_per_minute=90.0)
    first = head(num_pages)
    case = changed(first, [f"plugins.eviction={strategy}"])
    return TraceReplay(case, requests, stand_ins(requests, first), seconds).run()


def found(result: Replayed) -> float:
    agents = [one for one in result.ended if one.client.startswith("agents")]
    return sum(one.cached_tokens for one in agents) / sum(one.num_prompt_tokens for one in agents)


def test_prompts_that_come_once_have_no_block_in_common() -> None:
    requests = traffic(0, num_sessions=1, per_minute=4.0, singles_per_minute=30.0)
    blocks = [
        one.blocks[at : at + DIGEST_BYTES]
        for one in requests
        if one.client == "others"
        for at in range(0, len(one.blocks), DIGEST_BYTES)
    ]
    assert len(set(blocks)) == len(blocks) > 1000


@pytest.mark.slow
def test_leases_find_more_of_agents_prompts_than_lru() -> None:
    lru, lease = replayed("lru", 2500), replayed("lease", 2500)
    assert len(lru.ended) == len(lease.ended)
    assert found(lease) > found(lru) + 0.02


@pytest.mark.slow
def test_a_pool_that_leases_fill_serves_all() -> None:
    """Prompts have up to 15,000 tokens, and the pool 20,000: nothing waits for a lease to end."""
    result = replayed("lease", 600)
    assert all(one.num_output_tokens for one in result.ended)


def test_a_part_has_no_name_and_a_recorded_one_no_time() -> None:
    part = session_part("mine", 60.0)
    assert b"mine" not in part.data
    assert ttl_of(part) == 60.0
    assert ttl_of(RequestPart(part.digest)) == 0.0
    assert session_part("other").digest != part.digest


class Planned:
    """The feature in a planner that runs."""

    def __init__(self, share: float = 1.0) -> None:
        options = LeaseOptions(leased_share=share)
        built: list[SessionsPlanner] = []

        def build(parts: PlannerParts) -> SessionsPlanner:
            built.append(SessionsPlanner(parts, Leases(parts.limits.num_pages, options)))
            return built[0]

        self.bench = Bench(features=[build])
        (self.feature,) = built

    def admit(self, number: int, session: str, **origin: str) -> None:
        self.bench.streams[number], self.bench.ends[number] = [], []
        self.bench.planner.admit(
            Admit(
                request_id=number,
                token_ids=prompt_of(16, seed=number).tobytes(),
                params=SamplingParams(temperature=0.0, max_tokens=1),
                origin=Origin(**origin),
                parts={NAME: session_part(session)},
            )
        )

    def ask(self, number: int, session: str, **origin: str) -> None:
        self.admit(number, session, **origin)
        while self.bench.plan() or self.bench.deliver():
            pass

    @property
    def num_leased(self) -> int:
        return self.feature.gauges()["leased_pages"]

    def rate(self, now: float, step: int) -> float:
        return self.feature._steps_per_second(now, step)


def test_users_of_one_address_have_one_clients_leases() -> None:
    planned = Planned(share=0.25)  # 16 pages
    planned.ask(0, "s", client="192.0.2.1")
    assert planned.num_leased == 4
    for number in range(1, 10):
        planned.ask(number, f"s{number}", client="192.0.2.2", tenant=f"user {number}")
    assert planned.num_leased == 12, "two clients have 8 each"
    planned.bench.now = 61.0
    assert planned.num_leased == 0, "also while nothing comes"


def test_prompts_of_one_session_that_have_nothing_in_common_have_the_leases_of_one_client() -> None:
    planned = Planned(share=0.25)
    for number in range(10):
        planned.ask(number, "s", client="192.0.2.1")
        assert planned.num_leased == 4 * min(number + 1, 4)


def test_the_rate_of_steps_is_of_seconds_in_which_there_were_some() -> None:
    planned = Planned()
    assert planned.rate(0.0002, 1) == 0.0, "nothing is known"
    assert planned.rate(10.0, 500) == 50.0
    assert planned.rate(20.0, 1000) == 50.0
    assert planned.rate(20.0002, 1001) == 50.0, "two steps at once"
    assert planned.rate(21.0, 1100) == 100.0
    assert planned.rate(7200.0, 1200) == 50.0, "the last one that was known"
    assert planned.rate(7200.5, 1300) == 50.0
    assert planned.rate(7202.0, 1320) == 60.0, "an idle time is in no window"


def test_an_idle_time_before_a_request_is_not_in_the_rate() -> None:
    planned = Planned()
    planned.bench.now = 3600.0
    planned.admit(0, "s")
    assert planned.rate(3602.0, 100) == 50.0
