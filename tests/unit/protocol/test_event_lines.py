"""Event lines as another daemon may write them, broken ones, and events that cannot be sent."""

from __future__ import annotations

import time

import pytest

from slotd.protocol.errors import LocalProtocolError, RemoteProtocolError
from slotd.protocol.event_lines import format_event, parse_event
from slotd.protocol.messages import (
    Done,
    Error,
    Event,
    Json,
    Ok,
    Parked,
    SnapTaken,
    TokenLogprob,
    Tokens,
    Unknown,
)


@pytest.mark.parametrize(
    ("line", "event"),
    [
        ("[snap] slot=1 cur_pos=2 later=3", SnapTaken(slot=1, cur_pos=2)),
        ("[tok] id=a at=0 ids=5 later=3", Tokens(id="a", at=0, ids=(5,))),
        ("[tok] at=0 ids=5 id=a", Tokens(id="a", at=0, ids=(5,))),
        ("[tok] at=0 ids=", Tokens(at=0, ids=())),
        ("[done] status=ok id=a", Done(id="a", status="ok")),
        ("[done] status=ok x=nan", Done(status="ok", fields={"x": "nan"})),
        ('[done] status=ok x="a b" y=', Done(status="ok", fields={"x": "a b", "y": ""})),
        ("err later_code x=-1.5e3", Error(code="later_code", fields={"x": -1500.0})),
        ('[status]  {"a": 1, "id": "s"} ', Json(kind="status", data={"a": 1}, id="s")),
        ("ok", Ok()),
    ],
)
def test_other_ways_to_say_an_event(line: str, event: Event) -> None:
    assert parse_event(line) == event


@pytest.mark.parametrize(
    "line",
    [
        "[compress] 512 -> 64 tokens (keep_ratio=0.125)",
        "[prefill] token-seg ubatch=512",
        "[prefill] 512 tokens in 1.25 s, last_tok=4",
        "[step 3] committed=9",
        "[snap]",
        "[snap] freedom slot=1",
        "[snap] stores=1",
        "[snapshot] slot=1 cur_pos=2",
        "[park] everything released",
        "[daemon]",
        "[daemon] ready now",
        "[laguna-daemon] ready vocab=5",
        "okay N=1",
        "error bad_args",
        "[tok]at=0 ids=5",
    ],
)
def test_lines_of_other_forms_are_unknown(line: str) -> None:
    assert parse_event(line) == Unknown(text=line)


@pytest.mark.parametrize(
    "line",
    [
        "[tok]",
        "[tok] id=a at=0",
        "[tok] id=a at=x ids=5",
        "[tok] id=a at=0 ids=5,",
        "[tok] id=a at=0 ids=2147483648",
        "[tok] id=a at=0 ids=-1",
        "[tok] id=a/b at=0 ids=5",
        "[tok] id=a at=0 at=1 ids=5",
        "[tok] id=a at=0 ids=5 logprobs=[]x",
        "[tok] id=a at=0 ids=5 logprobs=[[NaN,[]]]",
        "[tok] id=a at=0 ids=5 logprobs=[[1e999,[]]]",
        "[tok] id=a at=0 ids=5 logprobs=[[-1.0,[[true,-1.0]]]]",
        "[tok] id=a at=0 ids=5 logprobs=[[-1.0,[]],[-1.0,[]]]",
        "[tok] id=a at=0 ids=5 logprobs=" + "[" * 100_000,
        "[tok] id=a at=0 ids=5 logprobs=[[" + "9" * 400 + ",[]]]",
        "[prefill] id=a at=3",
        "[prefill] id=a at=3/x",
        "[snap] slot=1",
        "[snap] slot=x cur_pos=1",
        "[snap] inline slot=1",
        "[snap] freed slot=-1",
        "[snap] slots=1,,2",
        "[snap] all-cleared",
        "[snap] all-cleared epoch=1 freed=1 kept= bytes=x",
        "[cancel] id=a found=2",
        "[done] id=a",
        "[done] id=a status=OK",
        "[done] id=a status=ok x=1 x=2",
        "[done] id=a status=ok x=1e999",
        "[done] id=a status=ok stray",
        "[done] id=a status=ok x=" + "9" * 5000,
        '[done] id=a status=ok x="open',
        "err",
        "err Bad!",
        "ok N=1 (RESTORE slot=1)",
        "[status]",
        "[status] []",
        "[status] {",
        "[status] {} x",
        '[status] {"id":5}',
        '[status] {"id":"a b"}',
        '[status] {"x":NaN}',
        '[status] {"x":1e999}',
        '[status] {"x":' + "[" * 100_000,
    ],
    ids=lambda line: line[:40],
)
def test_a_broken_line_of_a_known_form_is_an_error(line: str) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_event(line)


@pytest.mark.parametrize(
    "event",
    [
        Event(),
        Tokens(id="a b", at=0, ids=(5,)),
        Tokens(at=-1, ids=(5,)),
        Tokens(at=0, ids=(-1,)),
        Tokens(at=0, ids=(2**31,)),
        Tokens(at=0, ids=(5,), logprobs=(TokenLogprob(float("nan"), ()),)),
        Tokens(at=0, ids=(5,), logprobs=(TokenLogprob(-1.0, ()),) * 2),
        Parked(what="all"),
        SnapTaken(slot=-1, cur_pos=0),
        Done(status="two words"),
        Done(status="ok", fields={"id": 5}),
        Done(status="ok", fields={"status": 5}),
        Done(status="ok", fields={"a b": 5}),
        Done(status="ok", fields={"": 5}),
        Done(status="ok", fields={"x": float("inf")}),
        Done(status="ok", fields={"x": None}),  # type: ignore[dict-item]
        Error(code="Bad Code"),
        Json(kind="other"),
        Json(data={"id": "x"}),
        Json(data={"x": float("nan")}),
        Json(data={"x": b"bytes"}),
        Json(id="a b"),
        Unknown(text="two\nlines"),
        Unknown(text="\ud800"),
        Unknown(text="x", id="r"),
    ],
    ids=repr,
)
def test_an_event_that_cannot_be_sent(event: Event) -> None:
    with pytest.raises(LocalProtocolError):
        format_event(event)


def test_a_hostile_number_of_a_daemon_is_read_quickly() -> None:
    began = time.perf_counter()
    assert parse_event("err x a=" + "9" * 2_000_000 + "x") == Error(
        code="x", fields={"a": "9" * 2_000_000 + "x"}
    )
    assert time.perf_counter() - began < 2.0
