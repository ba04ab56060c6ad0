"""The two ends: one item for each line, in order, whatever the bytes are."""

from __future__ import annotations

import pytest

from slotd.protocol.connection import ClientConnection, DaemonConnection
from slotd.protocol.errors import LocalProtocolError, RequestError
from slotd.protocol.linebuffer import DEFAULT_MAX_LINE
from slotd.protocol.messages import (
    Command,
    Done,
    Event,
    Hello,
    Json,
    ListSlots,
    Prompt,
    Ready,
    Status,
    Tokens,
    Unknown,
)


def summary(item: Command | RequestError) -> tuple[str, str | None]:
    return (item.code if isinstance(item, RequestError) else item.verb, item.id)


def test_commands_and_refusals_keep_their_order() -> None:
    daemon = DaemonConnection(max_line=40)
    data = (
        b"LIST_SLOTS id=a\n"
        b"x.bin 5 top_p=2 id=b\n"
        b"\n"
        b"SNAPSHOT \xff id=c\n"
        b"- 5 id=d ids=" + b"1," * 50 + b"\n"
        b"nonsense\r\n"
        b"STATUS"
    )
    items = [*daemon.receive(data), *daemon.end()]
    assert [summary(item) for item in items] == [
        ("LIST_SLOTS", "a"), ("bad_args", "b"), ("unknown_command", None), ("bad_utf8", "c"),
        ("line_too_long", "d"), ("unknown_command", None), ("STATUS", None),
    ]  # fmt: skip


def test_a_refused_line_says_which_verb_it_has() -> None:
    daemon = DaemonConnection(max_line=40)
    refused = daemon.receive(
        b"SNAPSHOT \xff\n- 5 ids=" + b"1," * 50 + b"\nSNAPSHOT " + b"1" * 50 + b"\n\xff\n"
    )
    assert [(item.code, item.verb) for item in refused if isinstance(item, RequestError)] == [
        ("bad_utf8", "SNAPSHOT"),
        ("line_too_long", "PROMPT"),
        ("line_too_long", "SNAPSHOT"),
        ("bad_utf8", ""),
    ]


def test_a_line_that_is_too_long_names_the_limit() -> None:
    (error,) = DaemonConnection(max_line=10).receive(b"x" * 12)
    assert isinstance(error, RequestError)
    assert error.fields == {"limit": 10}


def test_the_default_limit_takes_a_line_of_16_mib_and_no_more() -> None:
    longest = b"- 1 ids=" + b"1" * (DEFAULT_MAX_LINE - 8)
    (error,) = DaemonConnection().receive(longest + b"\n")
    assert isinstance(error, RequestError)
    assert error.code == "bad_args"
    (error,) = DaemonConnection().receive(longest + b"1\n")
    assert isinstance(error, RequestError)
    assert error.code == "line_too_long"


def test_hello_changes_the_version_of_the_lines_behind_it() -> None:
    daemon = DaemonConnection()
    assert daemon.version == 1
    seen = [(type(item), daemon.version) for item in daemon.messages(b"LIST_SLOTS\nHELLO\nLIST_SLOTS\n")]
    assert seen == [(ListSlots, 1), (Hello, 1), (ListSlots, 2)]
    assert daemon.version == 2


def test_version_after_receive() -> None:
    daemon = DaemonConnection()
    assert daemon.receive(b"HELLO") == []
    assert daemon.version == 1
    assert daemon.end() == [Hello()]
    assert daemon.version == 2
    refused = DaemonConnection()
    assert isinstance(refused.receive(b"HELLO you\n")[0], RequestError)
    assert refused.version == 1


def test_the_ends_understand_each_other() -> None:
    daemon, client = DaemonConnection(), ClientConnection()
    commands: list[Command] = [Prompt(path="a b", n_gen=5, id="r1"), Status(), Hello()]
    assert daemon.receive(b"".join(client.send(command) for command in commands)) == commands
    events: list[Event] = [Ready(), Tokens(id="r1", at=0, ids=(5,)), Json(kind="hello", data={"x": "é\n"}),
                           Done(id="r1", status="ok", fields={"x": "é \ud800"})]  # fmt: skip
    assert client.receive(b"".join(daemon.send(event) for event in events)) == events
    assert (client.version, client.malformed) == (2, 0)


def test_a_client_counts_broken_lines_and_passes_their_text_on() -> None:
    client = ClientConnection(max_line=30)
    data = (
        b"[tok] at=x\n[cfg] chatter\n\xff!\n"
        + b"[status] "
        + b"x" * 50
        + b"\n[done] status=ok\n[snap] slot=1"
    )
    assert [*client.receive(data), *client.end()] == [
        Unknown(text="[tok] at=x"),
        Unknown(text="[cfg] chatter"),
        Unknown(text="\ufffd!"),
        Unknown(text="[status]"),
        Done(status="ok"),
        Unknown(text="[snap] slot=1"),
    ]
    assert client.malformed == 4


def test_a_client_sends_no_line_that_is_too_long() -> None:
    client = ClientConnection(max_line=20)
    assert client.send(Prompt(path="x" * 18, n_gen=5)) == b"x" * 18 + b" 5\n"
    with pytest.raises(LocalProtocolError, match="20"):
        client.send(Prompt(path="x" * 19, n_gen=5))


def test_sending_nonsense_is_a_bug_of_this_side() -> None:
    with pytest.raises(LocalProtocolError):
        DaemonConnection().send(Tokens(id="not an id", at=0, ids=(5,)))
    with pytest.raises(LocalProtocolError):
        ClientConnection().send(Prompt())
