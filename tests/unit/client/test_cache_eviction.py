from __future__ import annotations

import pytest

from slotd.client.cache_entries import FullEntry, Identity, PrefixEntry, as_bytes
from slotd.client.cache_eviction import full_score, full_victim, goes_on, prefix_victim

ME = Identity("model", "f16", "f16")


def entry(text: str, used: int, *, proven: bool = False) -> PrefixEntry:
    return PrefixEntry(text, ids(text), used, used=used, proven=proven)


def ids(text: str) -> bytes:
    return as_bytes(map(ord, text))


def victim(entries: list[PrefixEntry], new: str, away: int | None = None) -> str | None:
    found = prefix_victim(entries, ids(new), away)
    return None if found is None else found.key


def test_the_oldest_leaf_goes_and_the_shared_head_stays() -> None:
    assert victim([entry("S", 1), entry("Sa", 2), entry("Sb", 3)], "Sc") == "Sa"
    assert victim([entry("S", 1), entry("Sa", 3), entry("Sb", 2)], "T") == "Sb"


def test_an_ancestor_that_only_the_new_prompt_needs_goes_first() -> None:
    # Sa helps nobody but the conversation that now has Sabc; Tz is another one's only entry, and older.
    assert victim([entry("Tz", 1), entry("S", 2), entry("Sa", 3), entry("Sx", 4)], "Sabc") == "Sa"


def test_a_chain_keeps_its_head_and_its_end() -> None:
    chain = [entry("SSSS", 1), entry("SSSSab", 2), entry("SSSSabc", 3), entry("SSSSabcdd", 4)]
    assert victim(chain, "SSSSabcdde") == "SSSSabc"  # it adds least to the one below it


def test_equal_gains_give_up_the_oldest() -> None:
    assert victim([entry("SS", 9), entry("SSa", 3), entry("SSab", 2)], "SSabc") == "SSab"


def test_a_branch_point_is_no_victim_while_a_leaf_is_there() -> None:
    assert victim([entry("S", 1), entry("Sa", 5)], "Sb") == "Sa"


def test_conversations_that_came_back_stay_and_of_these_the_one_used_last_goes() -> None:
    proven = [entry("Aa", 1, proven=True), entry("Bb", 8, proven=True)]
    assert victim([*proven, entry("Cc", 9), entry("Dd", 5)], "T") == "Dd"
    assert victim(proven, "T") == "Bb"  # the daemon has it still; Aa may be the next to be asked for


def test_an_ended_conversation_makes_way_for_one_that_comes_back() -> None:
    entries = [entry("Aa", 1, proven=True), entry("Bb", 20, proven=True)]
    assert victim(entries, "T", away=9) == "Aa"  # idle for 19 ticks, more than twice as long
    assert victim(entries, "T", away=10) == "Bb"


def test_what_goes_on_from_an_entry_of_its_own() -> None:
    entries = [entry("S", 1), entry("Sa", 2), entry("Sb", 3)]
    assert goes_on(ids("Sac"), entries)
    assert not goes_on(ids("Sc"), entries)  # others start from S too
    assert not goes_on(ids("Sa"), entries[1:])


def test_the_only_entry_goes() -> None:
    assert victim([entry("S", 1)], "Sa") == "S"
    assert victim([entry("S", 1)], "T") == "S"
    assert victim([], "T") is None


def full(
    raw: str, *, hits: int = 0, used: int = 0, size: int = 100, kept: int = 10, slot: int | None = 0
) -> FullEntry:
    return FullEntry(ME.key(ids(raw)), ids("x" * kept), len(raw), slot, used, hits, size)


def test_the_score_is_hits_and_tokens_for_each_byte() -> None:
    score = full_score(full("abc", hits=3, size=200), ids("other"), ME.key)
    assert score == pytest.approx(4 * 10 / 200)
    assert full_score(full("abc", size=0), ids("other"), ME.key) == 0.0


@pytest.mark.parametrize(("hits", "factor"), [(0, 0.02), (2, 0.25)])
def test_an_overtaken_entry_is_worth_less(hits: int, factor: float) -> None:
    prompt = "abc" + "d" * 17
    score = full_score(full("abc", hits=hits), ids(prompt), ME.key)
    assert score == pytest.approx((hits + 1) * 10 / 100 * factor * 10 / 20)


def test_only_a_bound_strict_prefix_is_overtaken() -> None:
    plain = 10 / 100
    assert full_score(full("abc", slot=None), ids("abcd"), ME.key) == pytest.approx(plain)
    assert full_score(full("abc"), ids("abc"), ME.key) == pytest.approx(plain)
    assert full_score(full("abx"), ids("abcd"), ME.key) == pytest.approx(plain)


def test_the_lowest_score_goes_then_the_oldest() -> None:
    low, high = full("a", hits=0, used=9), full("b", hits=5, used=1)
    assert full_victim([high, low], ids("z"), ME.key) is low
    old, new = full("a", used=1), full("b", used=2)
    assert full_victim([new, old], ids("z"), ME.key) is old
    assert full_victim([], ids("z"), ME.key) is None
