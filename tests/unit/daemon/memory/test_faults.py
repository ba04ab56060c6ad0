"""SLOTD_FAULT: grammar and counting."""

from __future__ import annotations

import pytest

from slotd.daemon.memory import SITES, DeviceLost, DeviceMemory, Faults
from slotd.protocol.errors import ConfigError


@pytest.mark.parametrize("text", [None, ""])
def test_no_value_is_no_fault(text: str | None) -> None:
    assert Faults.parse(text) is None


@pytest.mark.parametrize("site", SITES)
def test_every_site_is_accepted(site: str) -> None:
    assert Faults.parse(f"{site}:3") == Faults(site, 3, 1)


@pytest.mark.parametrize(
    ("text", "failing"),
    [("decode:1", {1}), ("decode:3", {3}), ("decode:2:3", {2, 3, 4}), ("decode:1:1", {1})],
)
def test_the_nth_pass_and_the_following_fail(text: str, failing: set[int]) -> None:
    faults = Faults.parse(text)
    assert faults is not None
    assert {n for n in range(1, 8) if faults.hits("decode")} == failing


def test_other_sites_are_not_counted() -> None:
    faults = Faults("decode", 2)
    passes = ("decode", "commit", "commit", "decode")
    assert [faults.hits(site) for site in passes] == [False, False, False, True]


def test_an_unknown_site_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"SLOTD_FAULT=prefil:1: no site 'prefil'") as caught:
        Faults.parse("prefil:1")
    assert all(site in str(caught.value) for site in SITES)


@pytest.mark.parametrize(
    "text",
    ["decode", "decode:", "decode:0", "decode:-1", "decode:x", "decode:1:0", "decode:1:2:3", "decode:²"],
)
def test_bad_numbers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected SITE:NTH or SITE:NTH:COUNT"):
        Faults.parse(text)


def test_a_lost_device_happens_to_so_many_processes() -> None:
    faults = Faults.parse("device_lost:3:2")
    assert faults == Faults("device_lost", 3, 2)
    assert [faults.spares(n) for n in range(4)] == [False, False, True, True]
    assert not Faults("decode", 1).spares(5)


def test_a_lost_device_is_met_at_the_nth_forward_and_is_no_exception() -> None:
    memory = DeviceMemory(faults=Faults("device_lost", 3))
    memory.check_device()
    with memory.site("decode"):
        memory.check_device()
    with pytest.raises(DeviceLost, match="injected"):
        memory.check_device()
    assert not issubclass(DeviceLost, Exception)
