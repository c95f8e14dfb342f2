"""Whose cached prefixes are whose, and that what was renewed stays so for whoever goes on with it."""

import pytest

from engine.sections import ServerSection
from server.clients import CacheSalts

TWO = ServerSection(api_key=["one", "two"])


def test_keys_have_salts_that_do_not_tell_them_and_do_not_change() -> None:
    salts = [CacheSalts(TWO).of(number) for number in (0, 1)]
    assert len(set(salts)) == 2
    assert not {"one", "two", ""} & set(salts)
    assert salts == [CacheSalts(TWO).of(number) for number in (0, 1)]


@pytest.mark.parametrize(
    "server", [ServerSection(), ServerSection(api_key="one"), ServerSection(api_key=["one", "two"], shared_cache=True)]
)
def test_who_shares_has_one_salt_and_renews_it_for_all(server: ServerSection) -> None:
    salts = CacheSalts(server)
    assert [salts.of(number) for number in (None, 0, 1)] == [""] * 3
    salts.renew(1)
    assert len({salts.of(number) for number in (None, 0, 1)} - {""}) == 1


def test_what_is_kept_is_gone_on_with() -> None:
    kept: list[bytes] = []
    salts = CacheSalts(TWO, keep=kept.append)
    before = salts.of(0)
    salts.renew(0)
    again = CacheSalts(TWO, kept=kept[-1], keep=kept.append)
    assert (again.of(0), again.of(1)) == (salts.of(0), salts.of(1))
    assert again.of(0) != before
    again.renew(0)
    assert again.of(0) != salts.of(0)
    assert len(kept) == 2
