"""Every built-in by the kit that third parties get, attention on every device that this machine has."""

import importlib
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine.execution.split_attention import SplitAttention
from engine.layers.attention import AttentionFactory
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.comm.local import LocalComm
from engine.plugins.declaration import Declaration, read_declaration
from engine.plugins.hookspecs import ProposerContext
from engine.plugins.kv_store.files import FileStore
from engine.plugins.kv_store.kit import check_kv_store
from engine.plugins.logits_processor.no_repeat_ngram import NoRepeatNgram
from engine.plugins.logits_processor.thinking_budget import ThinkingBudget
from engine.plugins.manager import BUILTIN, Plugins
from engine.plugins.observer.log import RequestAndPageLog, RequestLog
from engine.plugins.proof.attention import check_case
from engine.plugins.proof.attention_cases import AttentionCase
from engine.plugins.proposer import suffix
from engine.plugins.snapshots.ends import EndsAndBranches
from engine.plugins.snapshots.kit import check_snapshot_policy
from engine.plugins.testing.attention import through_hook
from engine.plugins.testing.attention_cases import attention_cases
from engine.plugins.testing.comm import check_comm
from engine.plugins.testing.eviction import check_eviction_strategy
from engine.plugins.testing.grammar import check_grammar_engine
from engine.plugins.testing.logits_processor import check_logits_processor
from engine.plugins.testing.observer import check_observer
from engine.plugins.testing.policy import check_scheduling_policy
from engine.plugins.testing.proposer import check_proposer
from engine.plugins.testing.threads import ThreadComm
from engine.scheduling.proposer import Proposer
from tests.kv.cache_model import strategy
from tests.plugins.test_policy import policy

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def declaration(name: str) -> Declaration:
    declared = read_declaration(BUILTIN[name])
    assert declared is not None
    return declared


def backends(devices: Sequence[str]) -> list[tuple[str, str]]:
    """(built-in, device) of every attention backend whose packages are installed and that runs on the device."""
    declared = {name: declaration(name) for name in BUILTIN if name.startswith("attention.")}
    return [
        (name, device)
        for name, declares in declared.items()
        for device in devices
        if not declares.missing_packages() and (not declares.devices or device in declares.devices)
    ]


def test_every_backend_that_is_installed_is_tried_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backends(["cpu"]) == [("attention.tiles", "cpu"), ("attention.torch", "cpu")]
    monkeypatch.setattr(Declaration, "missing_packages", lambda self: [])
    for_gpus = {name for name in BUILTIN if name.startswith("attention.")} - {"attention.tiles"}
    assert set(backends(["cuda"])) == {(name, "cuda") for name in for_gpus}


def factory(name: str) -> AttentionFactory:
    return through_hook(importlib.import_module(BUILTIN[name]).callboard_attention_backend)


@pytest.mark.parametrize(
    ("name", "device", "case"),
    [
        pytest.param(name, device, case, id=f"{name}-{device}-{case}")
        for name, device in backends(DEVICES)
        for case in attention_cases(declaration(name))
    ],
)
def test_attention(name: str, device: str, case: AttentionCase) -> None:
    check_case(case, factory(name), device)


@pytest.mark.parametrize("case", attention_cases(Declaration(api=1)), ids=str)
def test_two_backends_behind_one(case: AttentionCase) -> None:
    check_case(case, lambda spec, pool: SplitAttention(TorchAttention(spec, pool), TorchAttention(spec, pool)))


@pytest.mark.parametrize("name", [name for name in BUILTIN if name.startswith("eviction.")])
def test_eviction(name: str) -> None:
    check_eviction_strategy(lambda: strategy(name.removeprefix("eviction.")))


@pytest.mark.parametrize("name", [name for name in BUILTIN if name.startswith("policy.")])
def test_policy(name: str) -> None:
    check_scheduling_policy(lambda: policy(name.removeprefix("policy.")))


def test_the_suffix_proposer_forgets_what_came_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MOST_TOKENS", 8)
    for num_between, guess in ((8, [4, 5]), (20, [])):
        session = suffix.SuffixProposer(suffix.SuffixOptions()).open()
        session.extend([1, 2, 3, 4, 5, *range(100, 100 + num_between), 2, 3])
        assert list(session.propose(2)) == guess
        assert len(session._followers) + len(session._older) <= 2 * 7 * 8


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_proposer(name: str) -> None:
    plugins = Plugins({"proposer": name})
    context = ProposerContext(vocab_size=1000, max_len=4096)
    check_proposer(lambda: plugins.build(f"proposer.{name}", context, Proposer))


def test_the_log() -> None:
    check_observer(RequestLog)
    check_observer(RequestAndPageLog)


def test_llguidance() -> None:
    pytest.importorskip("llguidance")
    from engine.plugins.grammar.llguidance import callboard_grammar_engine

    check_grammar_engine(lambda context: callboard_grammar_engine(context=context))


@pytest.mark.parametrize("device", DEVICES)
def test_no_repeat_ngram(device: str) -> None:
    check_logits_processor(NoRepeatNgram, [{"size": size} for size in (1, 2, 3, 40)], device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_thinking_budget(device: str) -> None:
    tables = [{"tokens": tokens, "opens": 3, "closes": 4} for tokens in (0, 1, 20)]
    check_logits_processor(lambda: ThinkingBudget(64), tables, device=device)


def test_files(tmp_path: Path) -> None:
    check_kv_store(lambda: FileStore(tmp_path, 1 << 20))


def test_snapshots_at_ends() -> None:
    check_snapshot_policy(EndsAndBranches)
    check_snapshot_policy(lambda: EndsAndBranches(every=3))


def test_local_comm() -> None:
    check_comm(lambda size: [LocalComm()], sizes=[1])


def test_the_ranks_of_other_tests_are_a_group_too() -> None:
    def group(size: int) -> list[ThreadComm]:
        posted: list[torch.Tensor | None] = [None] * size
        barrier = threading.Barrier(size)
        return [ThreadComm(rank, posted, barrier) for rank in range(size)]

    check_comm(group, sizes=(2, 3))
