import threading
from typing import Never

import pytest

from slotd.client.bus import Bus
from slotd.protocol.connection import ClientConnection
from slotd.protocol.errors import DaemonDiedError, DaemonTimeoutError
from slotd.protocol.messages import AllCleared, Event, Ready, SlotList


def say(bus: Bus, line: str) -> None:
    bus.dispatch(line, ClientConnection().receive(line.encode() + b"\n"))


def is_slots(event: Event) -> bool:
    return isinstance(event, SlotList)


def test_a_waiter_gets_its_event_and_is_gone() -> None:
    bus = Bus()
    with bus.expect(is_slots) as waiter:
        say(bus, "[daemon] ready")
        say(bus, "[snap] slots=1")
        assert bus.waiters == 0
        assert waiter.wait(0) == SlotList(slots=(1,))


def test_waiters_are_served_first_come_first_served_one_event_each() -> None:
    bus = Bus()
    with bus.expect(is_slots) as first, bus.expect(is_slots) as second:
        say(bus, "[snap] slots=1")
        say(bus, "[snap] slots=2")
        assert first.wait(0) == SlotList(slots=(1,))
        assert second.wait(0) == SlotList(slots=(2,))


def test_a_waiter_is_removed_on_timeout_and_on_an_exception() -> Never:
    bus = Bus()
    with pytest.raises(DaemonTimeoutError), bus.expect(is_slots) as waiter:
        waiter.wait(0.01)
    assert bus.waiters == 0
    with pytest.raises(KeyError), bus.expect(is_slots):
        raise KeyError
    assert bus.waiters == 0


def test_callbacks_run_before_waiters() -> None:
    bus = Bus()
    order = []
    bus.register_line_callback("[snap] all-cleared", lambda: order.append("line"))
    bus.register_event_callback(AllCleared, lambda event: order.append(event.epoch))

    def accepts(event: Event) -> bool:
        order.append("waiter")
        return True

    with bus.expect(accepts):
        say(bus, "[snap] all-cleared epoch=4 freed=0,1 kept= bytes=9")
    assert order == ["line", 4, "waiter"]


def test_a_line_callback_goes_by_prefix_and_gets_no_arguments() -> None:
    bus = Bus()
    calls = []
    bus.register_line_callback("[snap]", lambda *args: calls.append(("snap", args)))
    bus.register_line_callback("[snap] all-cleared", lambda *args: calls.append(("cleared", args)))
    bus.register_line_callback("[snap] all-cleared", lambda *args: calls.append(("too", args)))
    say(bus, "[snap] all-cleared")  # the source daemon's form
    say(bus, "x [snap] all-cleared")
    say(bus, "[snap] slots=")
    assert calls == [("snap", ()), ("cleared", ()), ("too", ()), ("snap", ())]


def test_an_event_callback_goes_by_type() -> None:
    bus = Bus()
    seen = []
    bus.register_event_callback(SlotList, seen.append)
    bus.register_event_callback(Event, seen.append)
    say(bus, "[daemon] ready")
    say(bus, "[snap] slots=1")
    assert seen == [Ready(), SlotList(slots=(1,)), SlotList(slots=(1,))]


def test_a_failing_callback_is_logged_and_stops_nothing(caplog) -> None:
    bus = Bus()
    calls = []

    def fail(*args: object) -> None:
        raise ZeroDivisionError("oh")

    bus.register_line_callback("[snap]", fail)
    bus.register_line_callback("[snap]", lambda: calls.append("line"))
    bus.register_event_callback(SlotList, fail)
    bus.register_event_callback(SlotList, lambda event: calls.append("event"))
    with bus.expect(is_slots) as waiter:
        say(bus, "[snap] slots=1")
        assert waiter.wait(0) == SlotList(slots=(1,))
    assert calls == ["line", "event"]
    assert caplog.text.count("ZeroDivisionError: oh") == 2


def test_a_failing_waiter_does_not_stop_the_reader(caplog) -> None:
    bus = Bus()

    def fail(event: Event) -> bool:
        raise ZeroDivisionError("oh")

    with bus.expect(fail), bus.expect(is_slots) as waiter:
        say(bus, "[snap] slots=1")
        assert waiter.wait(0) == SlotList(slots=(1,))
    assert "ZeroDivisionError: oh" in caplog.text


def test_the_end_fails_every_waiter_and_everybody_after() -> None:
    bus = Bus()
    with bus.expect(is_slots) as first, bus.expect(is_slots) as second:
        assert bus.fail(DaemonDiedError("exit code 3; its last words: no")) == 2
        assert bus.waiters == 0
        for waiter in (first, second):
            with pytest.raises(DaemonDiedError, match="exit code 3; its last words: no"):
                waiter.wait(0)
    with pytest.raises(DaemonDiedError, match="exit code 3"), bus.expect(is_slots):
        pass
    assert bus.wait_ended(0)


def test_a_waiting_thread_wakes_up() -> None:
    bus = Bus()
    with bus.expect(is_slots) as waiter:
        timer = threading.Timer(0.02, say, (bus, "[snap] slots=7"))
        timer.start()
        assert waiter.wait(5) == SlotList(slots=(7,))
        timer.join()
