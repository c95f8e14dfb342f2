"""The choice of the replica that has a prompt's beginning: blocks, reports of replicas, forgetting."""

import json

import pytest

from server.proxy.affinity import BLOCK_BYTES, MAX_BLOCKS, HeldBlocks, PrefixAffinity

LONG = "the quick brown fox jumps over the lazy dog. " * 40


def chat(*texts: str, **fields: object) -> bytes:
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def prompt(text: object, **fields: object) -> bytes:
    return json.dumps({"model": "m", "prompt": text, **fields}).encode()


def shared(first: list[bytes], second: list[bytes]) -> int:
    """Equal blocks from the start; chained hashes agree nowhere after they differ."""
    count = sum(a == b for a, b in zip(first, second, strict=False))
    assert first[:count] == second[:count]
    return count


def test_the_next_turn_of_a_conversation_begins_like_the_last_one() -> None:
    affinity = PrefixAffinity()
    first, second = affinity.blocks(chat(LONG)), affinity.blocks(chat(LONG, "yes", "and?"))
    assert shared(first, second) == len(first) - 1, "all but the block that was not full"


def test_other_fields_change_nothing_and_other_prompts_everything() -> None:
    affinity = PrefixAffinity()
    blocks = affinity.blocks(prompt(LONG))
    assert affinity.blocks(prompt(LONG, temperature=1, max_tokens=3)) == blocks
    assert shared(blocks, affinity.blocks(prompt("A" + LONG))) == 0
    assert shared(blocks, affinity.blocks(prompt(LONG[:600] + "!" + LONG[600:]))) == 600 // BLOCK_BYTES


@pytest.mark.parametrize("fields", [{"cache_salt": "a"}, {}])
def test_tenants_share_nothing(fields: dict) -> None:
    affinity = PrefixAffinity()
    one = affinity.blocks(prompt(LONG, **fields), "key one" if not fields else "")
    assert shared(one, affinity.blocks(prompt(LONG), "")) == 0


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"model": "m"}', b"\xff\xfe", b"[" * 100_000])
def test_what_has_no_prompt_has_no_blocks(body: bytes) -> None:
    assert PrefixAffinity().blocks(body) == []


def test_a_huge_prompt_costs_a_bounded_number() -> None:
    assert len(PrefixAffinity().blocks(prompt([7] * 500_000))) < MAX_BLOCKS
    assert len(PrefixAffinity().blocks(prompt("x" * 40_000_000))) == MAX_BLOCKS


def test_the_longest_beginning_wins_among_those_that_can() -> None:
    affinity = PrefixAffinity()
    short, long = affinity.blocks(prompt(LONG[:600])), affinity.blocks(prompt(LONG))
    affinity.note(short, "a")
    assert affinity.find(long, ["a", "b"]) == ["a"]
    affinity.note(long, "b")
    assert affinity.find(long, ["a", "b"]) == ["b"]
    assert affinity.find(long, ["a"]) == [], "the last one that was sent a block counts"
    assert affinity.find(affinity.blocks(prompt("new " + LONG)), ["a", "b"]) == []
    affinity.forget("b")
    assert affinity.find(long, ["b"]) == []


def test_reports_of_replicas_count() -> None:
    affinity = PrefixAffinity()
    long = affinity.blocks(prompt(LONG))
    affinity.learn("a", HeldBlocks("", 0, True, long[:2], []))
    affinity.learn("b", HeldBlocks("", 0, True, long[:4], []))
    assert affinity.find(long, ["a", "b"]) == ["b"]
    affinity.learn("b", HeldBlocks("", 1, False, [], long[2:4]))
    assert affinity.find(long, ["a", "b"]) == ["a", "b"]
    affinity.note(long, "a")
    assert affinity.find(long, ["a", "b"]) == ["a"]
    affinity.learn("a", HeldBlocks("", 2, False, long, []))
    affinity.learn("a", HeldBlocks("", 3, False, [], long))
    assert affinity.find(long, ["a", "b"]) == ["b"], "it has lost what it was sent"


def test_a_session_decides_where_texts_do_not() -> None:
    affinity = PrefixAffinity()
    ways: list[tuple[dict[str, object], str]] = [
        ({"session_id": "s"}, ""),
        ({"prompt_cache_key": "s"}, ""),
        ({}, "s"),
        ({"metadata": {"user_id": "s"}}, ""),
    ]
    plain = affinity.blocks(prompt(LONG))
    for fields, offered in ways:
        assert affinity.blocks(prompt(LONG, **fields), "", offered)[1:] == plain
    assert affinity.blocks(prompt(LONG, metadata={"trace": 7}, session_id=None)) == plain
    first = affinity.blocks(prompt(LONG, session_id="s"))
    for name in ("a", "b"):
        affinity.learn(name, HeldBlocks("", 0, True, first[1:], []))
    affinity.learn("b", HeldBlocks("", 1, False, first[:1], []))
    assert affinity.find(first, ["a", "b"]) == ["b"]
    assert affinity.find(affinity.blocks(prompt("other " + LONG, session_id="s")), ["a", "b"]) == ["b"]
    assert affinity.find(affinity.blocks(prompt(LONG)), ["a", "b"]) == ["a", "b"]


def test_bytes_that_are_no_text_name_no_session_and_are_the_replicas_to_refuse() -> None:
    affinity = PrefixAffinity()
    plain = affinity.blocks(prompt(LONG))
    body = prompt(LONG, metadata={"user_id": "?"}).replace(b"?", b"\xff")
    assert affinity.blocks(body) == plain
    assert len(affinity.blocks(prompt(LONG), tenant="Bearer \udcff")) == len(plain)


def test_what_is_remembered_is_bounded_and_the_ends_go_first() -> None:
    affinity = PrefixAffinity(max_known=4)
    long = affinity.blocks(prompt(LONG))
    affinity.note(long, "a")
    assert affinity.find(long[:4], ["a"]) == ["a"]
    assert affinity.find(long[4:], ["a"]) == []
