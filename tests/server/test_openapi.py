"""/openapi.json says what the server does: requests made from it are answered as it says."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.run.core import all_parts
from server.run.extension import declared
from server.run.openapi import document
from tests.server.http_client import ask
from tests.server.live_server import MODEL, LiveServer

schemathesis = pytest.importorskip("schemathesis")
from schemathesis import checks  # noqa: E402
from schemathesis.generation import GenerationMode  # noqa: E402
from schemathesis.specs.openapi import checks as openapi_checks  # noqa: E402

CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.negative_data_rejection,
]
OPERATIONS = declared(all_parts())
SCHEMA = schemathesis.openapi.from_dict(document("0", OPERATIONS))
BODIES = [one.name for one in OPERATIONS if one.body is not None]


def test_it_is_served_and_complete(live: LiveServer) -> None:
    served = ask(live.port, "GET", "/openapi.json").json
    assert served["openapi"] == "3.1.0"
    assert set(served["paths"]) == {one.name for one in OPERATIONS if one.summary}
    text = json.dumps(served)
    references = {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert references <= set(served["components"]["schemas"])
    for name in ("temperature", "top_k", "cache_salt", "guided_regex", "tools", "response_format"):
        assert f'"{name}"' in text


def test_every_route_that_takes_a_body_is_in_it(live: LiveServer) -> None:
    routed = {resource.canonical for resource in live.runner.app.router.resources()}
    assert set(BODIES) | {"/v1/tokenize", "/v1/detokenize"} <= routed


@pytest.mark.slow
@pytest.mark.reliability("H4", "150 requests of each route and kind, made from the OpenAPI document by schemathesis")
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", BODIES)
def test_requests_made_from_it_are_answered_as_it_says(
    live: LiveServer, path: str, mode: Any, at_full_size: bool
) -> None:
    operation = SCHEMA[path]["POST"]

    @settings(
        max_examples=150 if at_full_size else 10,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), right_model=st.booleans())
    def check(case: Any, right_model: bool) -> None:
        # Any text will do for the schema; what is no text may be the very thing that is to be refused.
        if right_model and isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = MODEL
        response = case.call(base_url=live.url, timeout=20)
        case.validate_response(response, checks=CHECKS)

    check()
    assert ask(live.port, "GET", "/ready").status == 200
    assert live.wait_until(lambda: live.ingress.num_open == 0, 5)
