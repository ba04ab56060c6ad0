import os
import struct
import threading
import time

from slotd.daemon.outbox import Outbox


def pipes() -> tuple[int, int, int, int]:
    return (*os.pipe(), *os.pipe())


def nothing() -> None:
    pass


def test_a_full_stream_pipe_holds_up_nobody_else() -> None:
    line_read, line_write, stream_read, stream_write = pipes()
    outbox = Outbox(line_write, stream_write, nothing, nothing)
    outbox.stream_ids(range(100_000), key=1)  # far more than a pipe holds, and nobody reads it
    outbox.line(b"[tok] id=a at=0 ids=5\n", "a")
    assert os.read(line_read, 100) == b"[tok] id=a at=0 ids=5\n"
    assert outbox.pending(1) > 0
    assert outbox.pending("a") == 0
    got = 0
    while got < 400_000:
        got += len(os.read(stream_read, 1 << 16))
    assert outbox.flush(10)
    assert outbox.pending(1) == 0


def test_the_end_of_a_response_waits_for_the_lines_before_it() -> None:
    line_read, line_write, stream_read, stream_write = pipes()
    outbox = Outbox(line_write, stream_write, nothing, nothing)
    big = b"x" * 300_000 + b"\n"  # does not fit the pipe, so the line is held up until it is read
    outbox.line(big)
    outbox.end_response(1)
    os.set_blocking(stream_read, False)
    time.sleep(0.1)
    try:
        early = os.read(stream_read, 4)
    except BlockingIOError:
        early = b""
    assert early == b""
    got = 0
    while got < len(big):
        got += len(os.read(line_read, 1 << 16))
    os.set_blocking(stream_read, True)
    assert struct.unpack("<i", os.read(stream_read, 4)) == (-1,)


def test_a_reader_that_left_is_told_once_and_nothing_hangs() -> None:
    line_read, line_write, stream_read, stream_write = pipes()
    gone = threading.Event()
    outbox = Outbox(line_write, stream_write, nothing, gone.set)
    os.close(stream_read)
    outbox.stream_ids([1, 2, 3], key=1)
    assert gone.wait(10)
    outbox.stream_ids([4], key=1)
    outbox.end_response(1)
    outbox.line(b"still here\n")
    assert os.read(line_read, 100) == b"still here\n"
    assert outbox.flush(10)
    assert not outbox.has_stream


def test_without_a_stream_ids_go_nowhere() -> None:
    line_read, line_write = os.pipe()
    outbox = Outbox(line_write, None, nothing, nothing)
    outbox.stream_ids([1], key=1)
    outbox.end_response(1)
    assert outbox.flush(10)
    assert not outbox.has_stream
    os.close(line_read)
