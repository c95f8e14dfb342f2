"""Sessions in the real planner: a prefix outlives its pause, and everything still ends and is freed."""

from benchmarks.agent_traffic import head, traffic
from engine.features.sessions.planner import session_part, ttl_of
from engine.features.traffic.sizes import StepSize
from engine.plugins.eviction.lease import leased
from engine.types.prompt import RequestPart
from server.extensions.whatif.changes import changed
from server.extensions.whatif.replay import Replayed, TraceReplay, stand_ins
from tests.kv.test_eviction import Shelf


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


def test_leases_find_more_of_agents_prompts_than_lru() -> None:
    lru, lease = replayed("lru", 2500), replayed("lease", 2500)
    assert len(lru.ended) == len(lease.ended)
    assert found(lease) > found(lru) + 0.02


def test_a_pool_that_leases_fill_serves_all() -> None:
    """Prompts have up to 15,000 tokens, and the pool 20,000: nothing waits for a lease to end."""
    result = replayed("lease", 1250)
    assert all(one.num_output_tokens for one in result.ended)


def test_a_part_has_no_name_and_a_recorded_one_no_time() -> None:
    part = session_part("mine", 60.0)
    assert b"mine" not in part.data
    assert ttl_of(part) == 60.0
    assert ttl_of(RequestPart(part.digest)) == 0.0
    assert session_part("other").digest != part.digest
