from __future__ import annotations

import pytest

from slotd.daemon.in_flight import InFlight
from slotd.daemon.link import Flags, Key, Submit
from slotd.protocol.messages import ListSlots


def submit(key: Key) -> Submit:
    return Submit(key, ListSlots(), Flags(), 0.0)


def test_what_was_begun_is_told_from_what_only_waits_in_order() -> None:
    requests = InFlight(8)
    for key in ("a", "b", 1, 2):
        requests.add(submit(key))
    requests.start("b")
    requests.start(2)
    requests.start("nobody")
    assert [each.key for each in requests.started()] == ["b", 2]
    assert [each.key for each in requests.waiting()] == ["a", 1]
    assert len(requests) == 4


def test_places_are_given_again_when_a_request_has_ended() -> None:
    requests = InFlight(2)
    assert {requests.add(submit("a")), requests.add(submit("b"))} == {0, 1}
    with pytest.raises(IndexError):
        requests.add(submit("c"))
    place = requests.place("a")
    ended = requests.finish("a")
    assert ended is not None
    assert ended.key == "a"
    assert requests.place("a") is None
    assert requests.finish("a") is None
    assert requests.add(submit("c")) == place
