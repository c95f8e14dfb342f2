"""What time and counters tell a client about keys and about the prompts of others."""

import json
import statistics
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from engine.config import Config, build_config
from engine.messages import Finish
from engine.plugins.hookspecs import hookimpl
from engine.scheduling.meter import RequestMetrics
from engine.settings.sections import ServerSection
from engine.types.errors import RequestError
from server.access import WrongKeys, check_access
from server.http.exchange import EXCHANGE
from server.keys import Keys
from tests.engine.held_steps import hold_steps
from tests.figures import Figure
from tests.models.checkpoints import build, random_tokens, save
from tests.server.http_client import RawClient, http_bytes
from tests.server.live_system import MODEL, LiveSystem

KEYS = ["first-" + "k" * 58, "other-" + "k" * 58]
NUM_SAMPLES = 1000
PROMPT_TOKENS = 480


def distance(samples: list[int], base: list[int]) -> float:
    """Between two medians, in median absolute deviations of ``base``."""
    middle = statistics.median(base)
    deviation = statistics.median(abs(sample - middle) for sample in base)
    return (statistics.median(samples) - middle) / deviation


class _Request(SimpleNamespace):
    """What the check of keys reads of a request."""

    def __getitem__(self, key: object) -> Any:
        assert key is EXCHANGE
        return SimpleNamespace(client="127.0.0.1")


@pytest.mark.reliability("H9", "1,000 wrong keys of each kind: nothing right, all right but the end")
async def test_how_long_a_wrong_key_takes_says_nothing_about_the_right_one(figure: Figure) -> None:
    minutes = count(step=60)  # no guess is slowed
    check = check_access(Keys(ServerSection(api_key=KEYS)), WrongKeys(lambda: next(minutes)))

    async def handler(request: object) -> web.Response:
        raise AssertionError("a wrong key was let through")

    guesses = {"nothing right": "x" * 64, "all but the last": KEYS[0][:-1] + "x", "second": KEYS[1][:-1] + "x"}
    times: dict[str, list[int]] = {name: [] for name in guesses}
    order = list(guesses)
    for _ in range(NUM_SAMPLES):
        order.append(order.pop(0))  # each comes after each other as often
        for name in order:
            route = SimpleNamespace(resource=None)
            headers = {"Authorization": f"Bearer {guesses[name]}"}
            request: Any = _Request(match_info=SimpleNamespace(route=route), headers=headers)
            started = time.perf_counter_ns()
            try:
                await check(request, handler)  # type: ignore[arg-type]
            except RequestError:
                times[name].append(time.perf_counter_ns() - started)
    assert all(len(samples) == NUM_SAMPLES for samples in times.values())
    base = times.pop("nothing right")
    farthest = max(abs(distance(samples, base)) for samples in times.values())
    figure("medians apart", farthest, "deviations", at_most=3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3-tied"), tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.reliability("H9", "1,000 prompts that another key, or the same one with another salt, has had cached")
def test_one_clients_prompts_are_in_nobody_elses_cache(checkpoint: Path, figure: Figure, at_full_size: bool) -> None:
    tables: dict[str, dict[str, Any]] = {
        "model": {"path": str(checkpoint), "name": MODEL, "tokenizer": "none"},
        "kv": {"num_pages": 2048, "page_size": 16},
        "server": {"api_key": KEYS},
    }
    probes = {"another key's": (KEYS[1], {}), "another salt's": (KEYS[0], {"cache_salt": "mine"})}
    times: dict[str, list[int]] = {name: [] for name in ("nobody's", *probes, "its own")}
    with LiveSystem(build_config(Config(), tables)) as live, RawClient(live.port) as client:

        def cached(kind: str, number: int, key: str, fields: dict[str, str]) -> int:
            prompt = random_tokens(PROMPT_TOKENS, number)
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
            headers = {"Authorization": f"Bearer {key}"}
            data = http_bytes("POST", "/v1/completions", json.dumps(body).encode(), headers)
            started = time.perf_counter_ns()
            client.send(data)
            reply = client.read_reply()
            times[kind].append(time.perf_counter_ns() - started)
            tokens: int = reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
            return tokens

        for number in range(NUM_SAMPLES if at_full_size else 40):
            assert cached("nobody's", number, KEYS[0], {}) == 0
            for name, (key, fields) in sorted(probes.items(), reverse=bool(number % 2)):
                assert cached(name, number, key, fields) == 0
            # All pages but the one that must be computed.
            assert cached("its own", number, KEYS[0], {}) == PROMPT_TOKENS - 16
    base = times["nobody's"]
    figure("medians apart", max(abs(distance(times[name], base)) for name in probes), "deviations", at_most=3)
    # What a leak would look like: time does tell a client what it has had cached itself.
    sooner = [own < nobodys for own, nobodys in zip(times["its own"], base, strict=True)]
    figure("its own answered sooner than uncached ones", sum(sooner) / len(sooner), at_least=0.75, patience=1.5)


class Ends:
    """Notes how many tokens requests had, in the order of their ends; not of those that have left."""

    def __init__(self, ended: list[int]) -> None:
        self._ended = ended

    @hookimpl
    def callboard_request_finished(self, requests: Sequence[RequestMetrics]) -> None:
        self._ended.extend(one.num_output_tokens for one in requests if one.finish == Finish.LENGTH)


@pytest.mark.parametrize("cached_by", ["", "another", "mine"])
def test_the_order_of_answers_says_nothing_of_what_others_have_cached(
    checkpoint: Path, cached_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a client with two requests could ask what others have asked.  What it has cached itself does go first."""
    tables: dict[str, dict[str, Any]] = {
        "model": {"path": str(checkpoint), "name": MODEL, "tokenizer": "none"},
        "kv": {"num_pages": 128, "page_size": 16},
        "scheduler": {"max_running": 1},
        "plugins": {"policy": "lpm"},
    }
    guess, other = random_tokens(64, 1), random_tokens(64, 2)
    go = hold_steps(monkeypatch)

    def request(prompt: list[int], salt: str = "mine", **fields: Any) -> bytes:
        salted = {"cache_salt": salt} if salt else {}
        body = {"model": MODEL, "prompt": prompt, "ignore_eos": True, "max_tokens": 1, **salted, **fields}
        return http_bytes("POST", "/v1/completions", json.dumps(body).encode())

    with (
        LiveSystem(build_config(Config(), tables)) as live,
        RawClient(live.port, timeout_s=60) as first,
        RawClient(live.port, timeout_s=60) as second,
    ):
        ended: list[int] = []
        live.call(lambda: live.system.monitor.watch(Ends(ended), "tests.ends"))
        second.send(request(guess, cached_by))
        assert second.read_reply().status == 200
        with RawClient(live.port) as running:
            running.send(request(random_tokens(16, 4), stream=True, max_tokens=400))
            assert live.wait_until(lambda gauges: gauges.num_running == 1, 10)
            go.clear()
            first.send(request(other))
            assert live.wait_until(lambda gauges: gauges.num_waiting == 1, 10)
            second.send(request(guess, max_tokens=2))
            assert live.wait_until(lambda gauges: gauges.num_waiting == 2, 10)
        assert live.wait_until(lambda gauges: gauges.num_open == 2, 10)
        go.set()  # the first one has left, and one of the two starts; the row is theirs in turn
        assert [one.read_reply().status for one in (first, second)] == [200, 200]
        assert live.wait_until(lambda _: len(ended) == 3, 10)
    assert ended == ([1, 2, 1] if cached_by == "mine" else [1, 1, 2])
