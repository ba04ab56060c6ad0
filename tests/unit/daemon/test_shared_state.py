from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from slotd.daemon import shared_state
from slotd.daemon.link import Flags
from slotd.daemon.shared_state import CURRENT_AT, STATE_BYTES, STATES_AT, SharedState


@pytest.fixture
def front() -> Iterator[SharedState]:
    block = SharedState()
    yield block
    block.close()


@pytest.fixture
def engine(front: SharedState) -> Iterator[SharedState]:
    block = SharedState(os.dup(front.descriptor))
    yield block
    block.close()


def test_nothing_is_there_before_the_first_state(front: SharedState) -> None:
    assert front.read() is None
    assert front.last_sign() == 0.0


def test_the_newest_state_and_when_it_was_written(front: SharedState, engine: SharedState) -> None:
    for epoch in range(5):
        engine.write({"epoch": epoch, "slots": {"3": {"tokens": 7}}})
        state = front.read()
        assert state is not None
        assert state.data == {"epoch": epoch, "slots": {"3": {"tokens": 7}}}
        assert state.at == front.last_sign()
        assert 0 <= time.monotonic() - front.last_sign() < 10


def test_a_state_that_does_not_fit_is_refused_and_the_last_one_stays(
    front: SharedState, engine: SharedState
) -> None:
    engine.write({"epoch": 1})
    with pytest.raises(ValueError, match=f"larger than {STATE_BYTES}"):
        engine.write({"epoch": 2, "much": "x" * STATE_BYTES})
    state = front.read()
    assert state is not None
    assert state.data == {"epoch": 1}


def test_a_writer_that_was_killed_in_the_middle_leaves_the_last_state_whole(
    front: SharedState, engine: SharedState
) -> None:
    engine.write({"epoch": 1})
    other = 1 - engine.cells[CURRENT_AT]
    start = STATES_AT + other * shared_state.PLACE_BYTES
    engine.cells[start : start + 200] = os.urandom(200)
    state = front.read()
    assert state is not None
    assert state.data == {"epoch": 1}


def test_what_does_not_match_its_checksum_is_not_read(front: SharedState, engine: SharedState) -> None:
    engine.write({"epoch": 1})
    start = STATES_AT + engine.cells[CURRENT_AT] * shared_state.PLACE_BYTES
    engine.cells[start + shared_state.HEADER.size + 3] ^= 1
    assert front.read() is None


def test_a_reader_never_sees_half_a_state(front: SharedState, engine: SharedState) -> None:
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            engine.write({"number": number, "again": [number] * (number % 500)})

    engine.write({"number": 0, "again": []})
    thread = threading.Thread(target=write)
    thread.start()
    last = 0
    try:
        for _ in range(2000):
            state = front.read()
            if state is not None:
                assert state.data["again"] == [state.data["number"]] * (state.data["number"] % 500)
                assert state.data["number"] >= last
                last = state.data["number"]
    finally:
        stop.set()
        thread.join()
    assert last > 0


def test_flags_reach_the_engine_and_looking_at_them_is_a_sign_of_life(
    front: SharedState, engine: SharedState
) -> None:
    flags = Flags()
    flags.paused = True
    flags.move(front.cells, front.flags_at(5))
    seen, other = engine.flags(engine.flags_at(5)), engine.flags(engine.flags_at(4))
    assert (seen.cancelled, seen.paused) == (False, True)
    flags.cancelled, flags.paused = True, False
    before = front.last_sign()
    assert (seen.cancelled, seen.paused) == (True, False)
    assert front.last_sign() > before
    assert (other.cancelled, other.paused) == (False, False)
    with pytest.raises(AttributeError):
        seen.cancelled = True
    flags.move(bytearray(2), 0)
    flags.cancelled = False
    assert seen.cancelled  # the place is not the request's any more
    assert not flags.cancelled
