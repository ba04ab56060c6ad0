import os
import threading
import time
from array import array
from collections.abc import Iterator

import pytest

from slotd.client.transport import Transport
from slotd.protocol.errors import DaemonDiedError, DaemonTimeoutError, LocalProtocolError
from slotd.protocol.messages import Cancel, ListSlots, Prompt, Ready, SlotList, Snapshot, Unknown


class Wire:
    """A transport and the other ends of its pipes."""

    def __init__(self) -> None:
        self.commands, stdin = os.pipe()
        stdout, self.events = os.pipe()
        self.lines = []
        self.ended = threading.Event()
        self.transport = Transport(
            os.fdopen(stdin, "wb", buffering=0),
            os.fdopen(stdout, "rb", buffering=0),
            on_line=lambda line, events: self.lines.append((line, events)),
            on_end=self.ended.set,
        )
        self.transport.start()

    def say(self, data: bytes) -> None:
        os.write(self.events, data)

    def hang_up(self) -> None:
        if self.events >= 0:
            os.close(self.events)
            self.events = -1

    def close(self) -> None:
        self.transport.close()
        self.hang_up()
        if self.commands >= 0:
            os.close(self.commands)


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.close()


def test_lines_come_whole_and_in_order_however_they_are_cut(wire) -> None:
    for byte in b"[daemon] ready\n[snap] slots=0,3\r\nsomething\xff else\n":
        wire.say(bytes([byte]))
    wire.hang_up()
    assert wire.ended.wait(5)
    assert wire.lines == [
        ("[daemon] ready", [Ready()]),
        ("[snap] slots=0,3", [SlotList(slots=(0, 3))]),
        ("something\ufffd else", [Unknown(text="something\ufffd else")]),
    ]


def test_half_a_line_at_the_end_is_no_line(wire, caplog) -> None:
    wire.say(b"[daemon] ready\n[snap] slots=0")
    wire.hang_up()
    assert wire.ended.wait(5)
    assert [line for line, _ in wire.lines] == ["[daemon] ready"]
    assert "half a line" in caplog.text


def test_a_line_that_breaks_the_grammar_is_kept_as_text_and_logged(wire, caplog) -> None:
    wire.say(b"[snap] slots=x\n")
    wire.hang_up()
    assert wire.ended.wait(5)
    assert wire.lines == [("[snap] slots=x", [Unknown(text="[snap] slots=x")])]
    assert "not a line of the protocol" in caplog.text


def test_a_line_without_end_does_not_eat_the_memory(wire, monkeypatch) -> None:
    monkeypatch.setattr("slotd.client.transport.MAX_LINE", 1000)
    wire.say(b"x" * 5000 + b"\n[daemon] ready\n")
    wire.hang_up()
    assert wire.ended.wait(5)
    assert wire.lines[-1] == ("[daemon] ready", [Ready()])


def test_commands_are_written_as_lines(wire) -> None:
    wire.transport.send(Snapshot(id="a", slot=3), 1)
    wire.transport.send(ListSlots(id="b"), 1)
    assert os.read(wire.commands, 1000) == b"SNAPSHOT 3 id=a\nLIST_SLOTS id=b\n"


def test_lines_are_logged_and_prompts_only_in_part(wire, caplog) -> None:
    caplog.set_level("DEBUG", "slotd.client.transport")
    wire.transport.send(Prompt(id="a", ids=array("i", range(1000)), n_gen=1), 1)
    wire.say(b"[daemon] ready\n")
    wire.hang_up()
    assert wire.ended.wait(5)
    assert ">> - 1 id=a ids=0,1,2" in caplog.text
    assert "999" not in caplog.text
    assert "<< [daemon] ready" in caplog.text


def test_a_command_that_has_no_line_writes_nothing(wire) -> None:
    with pytest.raises(LocalProtocolError):
        wire.transport.send(Snapshot(id="not an id", slot=3), 1)
    wire.transport.send(ListSlots(id="b"), 1)
    assert os.read(wire.commands, 1000) == b"LIST_SLOTS id=b\n"


def test_a_long_command_goes_through_a_full_pipe(wire) -> None:
    got = bytearray()

    def read() -> None:
        while not got.endswith(b"\n"):
            time.sleep(0.001)
            got.extend(os.read(wire.commands, 1 << 20))

    reader = threading.Thread(target=read)
    reader.start()
    wire.transport.send(Prompt(id="a", ids=array("i", [7]) * 200_000, n_gen=1), 10)
    reader.join(10)
    assert got.count(b"7") == 200_000


def test_writing_to_a_dead_daemon(wire) -> None:
    os.close(wire.commands)
    wire.commands = -1
    with pytest.raises(DaemonDiedError, match="does not read its input"):
        wire.transport.send(ListSlots(id="b"), 1)


def test_a_daemon_that_does_not_read_holds_nobody_up(wire) -> None:
    command = Prompt(id="a", ids=array("i", [7]) * 200_000, n_gen=1)
    with pytest.raises(DaemonTimeoutError):
        wire.transport.send(command, 0.1)
    with pytest.raises(DaemonDiedError):  # half a command is on the wire: no other may follow it
        wire.transport.send(ListSlots(id="b"), 0.1)


def test_try_send_never_waits(wire) -> None:
    assert wire.transport.try_send(Cancel(id="a"))
    assert os.read(wire.commands, 1000) == b"CANCEL id=a\n"
    while wire.transport.try_send(Cancel(id="a" * 60)):
        pass  # until the pipe is full
    with wire.transport._write_lock:
        assert not wire.transport.try_send(Cancel(id="a"))


def test_close_stops_reading_and_ends_the_input(wire) -> None:
    wire.transport.close()
    assert wire.ended.is_set()
    assert os.read(wire.commands, 10) == b""
    with pytest.raises(DaemonDiedError, match="input is closed"):
        wire.transport.send(ListSlots(id="b"), 1)
    wire.transport.close()  # again


def test_attached_pipes_are_left_as_they_were() -> None:
    commands, stdin = os.pipe()
    stdout, events = os.pipe()
    ended = threading.Event()
    transport = Transport.attach(stdin, stdout, on_line=lambda line, events: None, on_end=ended.set)
    transport.start()
    transport.close()
    assert ended.wait(5)
    assert os.get_blocking(stdin)
    os.write(stdin, b"x")
    os.write(events, b"y")
    assert (os.read(commands, 10), os.read(stdout, 10)) == (b"x", b"y")
    for fd in (commands, stdin, stdout, events):
        os.close(fd)
