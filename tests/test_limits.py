"""Every limit and time of the configuration has a test that reaches it; a new one needs one before it may go in."""

import ast
from pathlib import Path

import pytest

from engine.config import Config, LimitsSection, PlacementSection, ServerSection, build_config
from engine.system import System

TESTS = Path(__file__).parent
# Setting -> the test that runs into it.
REACHED = {
    "limits.max_requests": "actors/test_ingress.py::test_requests_past_the_limit_get_429_and_a_place_comes_free",
    "limits.max_queued_tokens": (
        "actors/test_ingress.py::test_queued_prompt_tokens_are_limited_but_one_request_always_gets_in"
    ),
    "limits.max_choices": "server/test_generation.py::test_too_many_choices_are_refused",
    "limits.max_requests_per_client": (
        "server/test_clients.py::test_a_client_has_its_share_of_the_queue_and_others_have_theirs"
    ),
    "limits.first_token_timeout_s": (
        "actors/test_ingress.py::test_a_request_without_a_token_is_told_to_come_back_and_one_with_some_may_go_on"
    ),
    "limits.request_timeout_s": ("actors/test_ingress.py::test_a_request_past_its_deadline_is_cancelled_and_says_so"),
    "server.max_connections": "server/test_deadlines.py::test_connections_beyond_the_cap_are_told_so",
    "server.max_body_bytes": "server/test_malformed.py::test_the_largest_body_allowed_is_served",
    "server.header_timeout_s": "server/test_deadlines.py::test_a_dripping_header_is_cut",
    "server.body_timeout_s": "server/test_deadlines.py::test_a_dripping_body_is_cut",
    "server.keepalive_timeout_s": "server/test_deadlines.py::test_an_idle_connection_is_closed",
    "server.write_timeout_s": "server/test_deadlines.py::test_a_reader_that_stalls_is_cut_and_its_request_cancelled",
    "server.drain_timeout_s": "server/test_serve.py::test_what_is_open_when_draining_ends_is_told_so",
    "placement.join_timeout_s": "workers/test_cluster.py::test_a_store_without_a_head_is_waited_at_so_long",
    "placement.step_timeout_s": "workers/test_recovery.py::test_a_hang_in_this_process_is_a_clear_failure",
    "placement.silence_timeout_s": "workers/test_server.py::test_a_hung_executor_shows_and_is_replaced",
    "placement.max_restarts": (
        "workers/test_server.py::test_an_executor_that_cannot_live_ends_the_server_with_one_line"
    ),
    "placement.restart_window_s": "workers/test_executors.py::test_intensity_forgets_what_is_long_ago",
}
SECTIONS = {"limits": LimitsSection, "server": ServerSection, "placement": PlacementSection}


def limits() -> list[str]:
    """Settings that bound something: all of [limits], elsewhere what is called a most or a time."""
    return [
        f"{section}.{key}"
        for section, kind in SECTIONS.items()
        for key in kind.__struct_fields__
        if section == "limits" or key.startswith("max_") or key.endswith("_s")
    ]


@pytest.mark.reliability("G3", "every limit of the configuration looked up among the tests")
@pytest.mark.parametrize("setting", limits())
def test_it_is_reached_by_a_test(setting: str) -> None:
    assert setting in REACHED, f"{setting} bounds something, and no test is named that runs into it"
    path, _, name = REACHED[setting].partition("::")
    functions = [node.name for node in ast.walk(ast.parse((TESTS / path).read_text())) if hasattr(node, "name")]
    assert name in functions, f"{setting}: {REACHED[setting]} is gone"


def test_nothing_is_named_that_is_no_limit() -> None:
    assert set(REACHED) == set(limits())


def test_restarts_are_counted_as_the_configuration_says() -> None:
    system = System(build_config(Config(), {"placement": {"max_restarts": 5, "restart_window_s": 7.0}}))
    intensity = system.executors._group.intensity
    assert (intensity.max_restarts, intensity.window_s) == (5, 7.0)
