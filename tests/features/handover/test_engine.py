"""Two engines hand prompts over for real, through either carrier: no token changes, and no page is held at the end."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from callboard import LLM, SamplingParams
from engine.features.handover.wish import Wish
from engine.features.lora.files import NAME as ADAPTERS
from engine.features.lora.files import Adapter, AdapterRules, read_adapter
from engine.messages import Delta, RequestOptions
from tests.features.lora.made import make_adapter
from tests.models.checkpoints import build, random_tokens, save

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [random_tokens(length, seed=length) for length in (33, 70, 130, 200)]
KEY = "of these tests, and of no other"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3"), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """The tokens of an undivided engine."""
    with engine(checkpoint, {}) as llm:
        return [list(llm.generate([prompt], PARAMS)[0].token_ids) for prompt in PROMPTS]


def engine(checkpoint: Path, config: dict[str, Any]) -> LLM:
    base = {"kv": {"page_size": 16, "num_pages": 64}, "model": {"dtype": "float32", "tokenizer": "none"}}
    return LLM(checkpoint, progress=False, config=base | config)


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def configured(carrier: str, name: str, folder: Path, peers: dict[str, str], **more: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"name": name, "group_kb": 8, **more}
    if carrier == "tcp":
        (folder / "key").write_text(KEY)
        options |= {"peers": peers, "key_file": str(folder / "key")}
    else:
        options |= {"path": str(folder), "ring_mb": 4}
    return {"plugins": {"transfer": carrier, "options": {f"transfer.{carrier}": options}}}


@contextmanager
def pair(
    checkpoint: Path, carrier: str, folder: Path, config: dict[str, Any] | None = None, **more: Any
) -> Iterator[tuple[LLM, LLM]]:
    """Two engines that know each other as p and d.  config: of both, beside the carrier's."""
    folder.mkdir(mode=0o700, exist_ok=True)
    peers = {}
    if carrier == "tcp":
        peers = {name: f"tcp://127.0.0.1:{port}" for name, port in zip("pd", free_ports(2), strict=True)}
    with (
        engine(checkpoint, configured(carrier, "p", folder, peers, **more) | (config or {})) as p,
        engine(checkpoint, configured(carrier, "d", folder, peers, **more) | (config or {})) as d,
    ):
        yield p, d


def ask(llm: LLM, prompt: list[int], wish: Wish, resumed: bytes = b"", adapter: Adapter | None = None) -> Delta:
    """Return the answer of an engine to a request with a wish."""
    parts = wish.parts() | (adapter.parts if adapter is not None else {})
    options = RequestOptions(parts=parts, resumed=resumed)
    (delta,) = llm._await(llm._complete_all([prompt], [PARAMS], llm._bar(1, "", None), options))
    return delta


def read(llm: LLM, folder: Path) -> Adapter:
    """Return an adapter as an engine's requests name it."""
    return read_adapter(folder, msgspec.msgpack.decode(llm._system.engine.facts[ADAPTERS], type=AdapterRules))


def ids(delta: Delta) -> list[int]:
    return np.frombuffer(delta.token_ids, dtype=np.int32).tolist()


def gauges(llm: LLM) -> dict[str, int]:
    planner = llm._system.scheduler.planner
    assert planner is not None
    planner.check()
    return planner.features.gauges()


def until_nothing_is_held(*engines: LLM) -> None:
    deadline = time.monotonic() + 10
    while held := [one for llm in engines for one in [gauges(llm)] if one["lent_pages"] or one["borrowing"]]:
        assert time.monotonic() < deadline, held
        time.sleep(0.02)


@pytest.mark.parametrize("carrier", ["shared_memory", "tcp"])
def test_a_prompt_is_computed_by_one_engine_and_answered_by_another(
    checkpoint: Path, expected: list[list[int]], tmp_path: Path, carrier: str
) -> None:
    with pair(checkpoint, carrier, tmp_path / "rings") as (p, d):
        for number, (prompt, tokens) in enumerate(zip(PROMPTS, expected, strict=True)):
            first = ask(p, prompt, Wish(offer=f"o{number}", id=f"o{number}"))
            assert ids(first) == tokens[:1], "the prefill engine ends with the first token"
            answer = ask(d, prompt, Wish(peer="p", claim=f"o{number}", id=f"o{number}"))
            assert ids(answer) == tokens
            assert answer.usage.cached_tokens == (len(prompt) - 1) // 16 * 16
        until_nothing_is_held(p, d)


def test_a_prefix_is_fetched_without_an_offer_and_a_row_goes_on_elsewhere(
    checkpoint: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    with pair(checkpoint, "shared_memory", tmp_path / "rings") as (p, d):
        assert ids(ask(p, PROMPTS[2], Wish())) == expected[2]
        answer = ask(d, PROMPTS[2] + [1, 2, 3], Wish(peer="p", id="prefix"))
        assert answer.usage.cached_tokens == 128
        until_nothing_is_held(p, d)


@pytest.mark.parametrize(("family", "carrier"), [("lfm2", "shared_memory"), ("granite4-hybrid", "tcp")])
def test_the_state_of_a_hybrid_moves_with_its_pages(family: str, carrier: str, tmp_path: Path) -> None:
    hybrid = save(build(family), tmp_path / family)
    with pair(hybrid, carrier, tmp_path / "rings") as (p, d):
        for number, prompt in enumerate(PROMPTS[1:]):
            alone = list(p.generate([prompt], PARAMS)[0].token_ids)
            ask(p, prompt, Wish(offer=f"o{number}", id=f"o{number}"))
            answer = ask(d, prompt, Wish(peer="p", claim=f"o{number}", id=f"o{number}"))
            assert ids(answer) == alone
            assert answer.usage.cached_tokens == (len(prompt) - 1) // 16 * 16
        until_nothing_is_held(p, d)


def test_pages_of_an_adapter_are_found_under_the_same_adapter_alone(tmp_path: Path) -> None:
    model, prompt = build("qwen3"), PROMPTS[2]
    directory, folder = save(model, tmp_path / "model"), tmp_path / "adapters"
    paths = [make_adapter(folder / f"a{seed}", model, seed) for seed in (1, 2)]
    lora = {"lora": {"folder": str(folder), "max_adapters": 2}}
    with pair(directory, "shared_memory", tmp_path / "rings", lora) as (p, d):
        first, second = (read(p, path) for path in paths)
        alone = ids(ask(p, prompt, Wish(), adapter=first))
        found = [ask(d, prompt, Wish(peer="p", id=f"{n}"), adapter=one) for n, one in enumerate((second, None, first))]
        assert [one.usage.cached_tokens for one in found] == [0, 0, 128]
        assert ids(found[2]) == alone
        assert ids(found[1]) == ids(ask(p, prompt, Wish())) != alone
        until_nothing_is_held(p, d)


def test_a_peer_that_is_not_there_costs_the_time_limit_and_no_token(
    checkpoint: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    with pair(checkpoint, "shared_memory", tmp_path / "rings", timeout_s=0.2) as (p, d):
        for peer in ("none", "../../etc", "p"):
            answer = ask(d, PROMPTS[1], Wish(peer=peer, claim="none", id=peer))
            assert ids(answer) == expected[1]
        until_nothing_is_held(p, d)
