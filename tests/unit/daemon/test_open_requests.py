from __future__ import annotations

import pytest

from slotd.daemon import open_requests
from slotd.daemon.link import Key
from slotd.daemon.open_requests import OpenRequest, OpenRequests, Refusal
from slotd.protocol.errors import RequestError
from slotd.protocol.messages import ListSlots


def request(key: Key) -> OpenRequest:
    command = ListSlots(id=key if isinstance(key, str) else None)
    return OpenRequest(key, command, lambda _: None, version_2=False, taken_at=0.0)


REFUSAL = Refusal(RequestError("unknown_command"), version_2=False)


def test_only_a_text_key_is_an_id() -> None:
    assert request("a").id == "a"
    assert request(3).id is None


def test_an_id_is_open_until_it_is_removed() -> None:
    requests, first = OpenRequests(), request("a")
    requests.add(first)
    assert requests.get("a") is first
    with pytest.raises(RequestError) as caught:
        requests.add(request("a"))
    assert (caught.value.code, caught.value.verb, caught.value.id) == ("duplicate_id", "LIST_SLOTS", "a")
    assert requests.get("a") is first
    assert requests.remove("a") is first
    assert requests.remove("a") is None
    requests.add(request("a"))


def test_numbers_are_never_given_twice() -> None:
    requests = OpenRequests()
    assert len({requests.next_number() for _ in range(100)}) == 100


def test_the_lane_gives_one_at_a_time_in_order() -> None:
    requests = OpenRequests()
    first, second = request(1), request(2)
    requests.enqueue(first)
    requests.enqueue(second)
    assert requests.get(1) is None  # queued, not open
    assert requests.next_in_lane() is first
    assert requests.lane_current is requests.get(1) is first
    assert requests.next_in_lane() is None
    requests.remove(1)
    assert requests.lane_current is None
    assert requests.next_in_lane() is second


def test_an_id_does_not_hold_the_lane() -> None:
    requests = OpenRequests()
    requests.add(request("a"))
    requests.enqueue(request(1))
    assert requests.next_in_lane() is requests.lane_current
    requests.remove("a")
    assert requests.lane_current is requests.get(1)


def test_a_refusal_takes_its_turn_and_holds_nothing() -> None:
    requests = OpenRequests()
    current, behind = request(1), request(2)
    for item in (current, REFUSAL, behind):
        requests.enqueue(item)
    assert requests.next_in_lane() is current
    assert requests.next_in_lane() is None
    requests.remove(1)
    assert requests.next_in_lane() is REFUSAL
    assert requests.lane_current is None
    assert requests.next_in_lane() is behind


def test_counts() -> None:
    requests = OpenRequests()
    requests.add(request("a"))
    for number in (1, 2, 3):
        requests.enqueue(request(number))
    requests.next_in_lane()
    assert requests.report() == {"open": 2, "lane": 2}
    assert len(requests) == 4
    assert [entry.key for entry in requests] == ["a", 1]


def test_requests_may_end_while_they_are_walked_through() -> None:
    requests = OpenRequests()
    for key in "abc":
        requests.add(request(key))
    for entry in requests:
        requests.remove(entry.key)
    assert len(requests) == 0


def test_too_many_are_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_requests, "MAX_OPEN", 3)
    requests = OpenRequests()
    requests.add(request("a"))
    requests.enqueue(request(1))  # what waits counts too
    requests.add(request("b"))
    with pytest.raises(RequestError) as caught:
        requests.add(request("c"))
    assert (caught.value.code, caught.value.fields) == ("busy", {"open": 3, "limit": 3})
    with pytest.raises(RequestError, match="duplicate_id"):
        requests.add(request("a"))
    requests.remove("b")
    requests.add(request("c"))


def test_a_lane_that_is_too_long_takes_refusals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_requests, "MAX_OPEN", 2)
    requests = OpenRequests()
    requests.enqueue(request(1))
    requests.enqueue(request(2))
    with pytest.raises(RequestError) as caught:
        requests.enqueue(request(3))
    assert (caught.value.code, caught.value.id) == ("busy", None)
    requests.enqueue(Refusal(caught.value, version_2=False))
    assert len(requests) == 3
