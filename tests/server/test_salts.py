"""Whose cached prefixes are whose, and that what was renewed stays so for whoever goes on with it."""

import pytest

from engine.settings.sections import ServerSection
from server.clients import CacheSalts
from server.keys import Keys

TWO = ServerSection(api_key=["one", "two"])
ONE, OTHER = (Keys(TWO).find(key) for key in (b"one", b"two"))


def test_keys_have_salts_that_do_not_tell_them_and_do_not_change() -> None:
    salts = [CacheSalts(TWO).of(key) for key in (ONE, OTHER)]
    assert len(set(salts)) == 2
    assert not {"one", "two", ""} & set(salts)
    assert salts == [CacheSalts(TWO).of(key) for key in (ONE, OTHER)]


@pytest.mark.parametrize(
    "server", [ServerSection(), ServerSection(api_key="one"), ServerSection(api_key=["one", "two"], shared_cache=True)]
)
def test_who_shares_has_one_salt_and_renews_it_for_all(server: ServerSection) -> None:
    salts = CacheSalts(server)
    assert [salts.of(key) for key in (None, ONE, OTHER)] == [""] * 3
    salts.renew(OTHER)
    assert len({salts.of(key) for key in (None, ONE, OTHER)} - {""}) == 1


def test_what_is_kept_is_gone_on_with() -> None:
    kept: list[bytes] = []
    salts = CacheSalts(TWO, keep=kept.append)
    before = salts.of(ONE)
    salts.renew(ONE)
    again = CacheSalts(TWO, kept=kept[-1], keep=kept.append)
    assert (again.of(ONE), again.of(OTHER)) == (salts.of(ONE), salts.of(OTHER))
    assert again.of(ONE) != before
    again.renew(ONE)
    assert again.of(ONE) != salts.of(ONE)
    assert len(kept) == 2
