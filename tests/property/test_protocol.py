"""Round trips of any message, and any bytes: nothing raises, every line gives one item, cuts do not count."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from slotd.protocol import messages
from slotd.protocol.connection import ClientConnection, DaemonConnection
from slotd.protocol.errors import CODES, RequestError
from slotd.protocol.messages import Command, Event, Sampling, Snap, TokenLogprob, Unknown
from slotd.protocol.wire import format_command, format_event, parse_command, parse_event

INT32 = 2**31 - 1

ids = st.from_regex(r"[A-Za-z0-9._:-]{1,64}", fullmatch=True)
maybe_id = st.none() | ids
slots = st.integers(0, INT32)
counts = st.integers(0, 2**63 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
keys = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
codes = st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True)
# Texts that look like parts of the grammar break parsers sooner than random ones.
texts = st.text(max_size=12) | st.sampled_from(
    [
        "",
        "-",
        "id=r1",
        "a=b",
        "5",
        "1e9",
        "nan",
        '"',
        '"x"',
        "a b",
        'a" b',
        "park",
        "\\",
        "\x00",
        "\ud800",
        "é",
        "\u2028",
        "0x1",
    ]
)
paths = texts.filter(lambda text: text and "\0" not in text and "\ud800" not in text)
fields = st.dictionaries(
    keys.filter(lambda key: key not in ("id", "status")), texts | st.integers() | finite, max_size=5
)


def within(low: float, high: float, above: bool = False) -> st.SearchStrategy[float]:
    return st.floats(low, high, exclude_min=above)


sampling = st.builds(
    Sampling,
    temperature=within(0, 100),
    top_k=slots,
    top_p=within(0, 1, above=True),
    min_p=within(0, 1),
    repetition_penalty=within(0, 100, above=True),
    penalty_window=slots,
    frequency_penalty=within(-100, 100),
    presence_penalty=within(-100, 100),
    logit_bias=st.dictionaries(slots, within(-1000, 1000), max_size=4).map(
        lambda biases: tuple(biases.items())
    ),
    seed=st.none() | st.integers(0, 2**64 - 1),
)
prompt_ids = st.lists(st.integers(-INT32 - 1, INT32), max_size=8).map(lambda values: array("i", values))

tiers = st.sampled_from([None, "device", "host", "disk"])
hashes = st.text("0123456789abcdef", min_size=32, max_size=32)


@st.composite
def prompts(draw: st.DrawFn) -> Command:
    inline = draw(st.booleans())
    n_gen = draw(slots)
    own: dict[str, Any] = {
        "id": draw(maybe_id),
        "path": None if inline else draw(paths),
        "ids": draw(prompt_ids) if inline else None,
        "n_gen": n_gen,
        "snap": draw(st.none() | st.builds(Snap, st.integers(1, INT32), slots)),
        "sampling": draw(sampling),
        "stop": tuple(draw(st.lists(slots, max_size=3))),
        "logprobs": draw(st.integers(0, 20)),
        "min_tokens": draw(st.integers(0, n_gen)),
        "ignore_eos": draw(st.booleans()),
        "fit": draw(st.booleans()),
        "tier": draw(tiers),
    }
    match draw(st.integers(0, 2)):
        case 0:
            return messages.Prompt(**own)
        case 1:
            return messages.Restore(slot=draw(slots), **own)
    thick, thins = draw(st.integers(-1, INT32)), draw(st.lists(slots, max_size=3))
    return messages.RestoreChain(thick=thick, thins=tuple(thins), **own)


@st.composite
def thin_snapshots(draw: st.DrawFn) -> Command:
    start = draw(st.integers(0, INT32 - 1))
    end = draw(st.integers(start + 1, INT32))
    return messages.SnapshotThin(
        id=draw(maybe_id), slot=draw(slots), kv_start=start, kv_end=end, of=draw(maybe_id)
    )


whats = st.sampled_from(["all", "draft", "target"])
unsupported = st.just(("compress", True))
commands: st.SearchStrategy[Command] = st.one_of(
    prompts(),
    st.builds(messages.Generate, id=maybe_id, path=paths, n_gen=slots, out=paths, sampling=sampling),
    st.builds(messages.Snapshot, id=maybe_id, slot=slots, of=maybe_id, tier=tiers, held=st.booleans()),
    thin_snapshots(),
    st.builds(messages.LoadSnapshot, id=maybe_id, slot=slots, hash=hashes),
    st.builds(messages.Drop, id=maybe_id, hash=hashes),
    st.builds(messages.FreeSnapshot, id=maybe_id, slot=slots),
    st.builds(messages.Park, id=maybe_id, what=whats),
    st.builds(messages.Unpark, id=maybe_id, what=whats),
    *(
        st.builds(cls, id=maybe_id)
        for cls in (
            messages.ListSlots,
            messages.Stored,
            messages.FreeDrafter,
            messages.Hello,
            messages.Cancel,
            messages.Status,
            messages.Props,
            messages.Quit,
        )
    ),
    st.builds(
        lambda id, verb: messages.Unsupported(id=id, name=verb[0], needs_stream_end=verb[1]),
        maybe_id,
        unsupported,
    ),
)

number_lists = st.lists(counts, max_size=4).map(tuple)
token_ids = st.lists(slots, min_size=1, max_size=4).map(tuple)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
logprobs = st.builds(TokenLogprob, finite, st.lists(st.tuples(slots, finite), max_size=3).map(tuple))


@st.composite
def token_events(draw: st.DrawFn) -> Event:
    values = draw(token_ids)
    said = draw(st.booleans())
    own = tuple(draw(logprobs) for _ in values) if said else ()
    return messages.Tokens(
        id=draw(maybe_id), at=draw(counts.filter(lambda at: at < 10**18)), ids=values, logprobs=own
    )


names = st.sampled_from(["draft", "target"])
events: st.SearchStrategy[Event] = st.one_of(
    token_events(),
    st.builds(messages.Ready),
    st.builds(messages.SnapTaken, id=maybe_id, slot=counts, cur_pos=counts),
    st.builds(messages.SnapInline, id=maybe_id, slot=counts, cur_pos=counts),
    st.builds(messages.SnapInlineFailed, id=maybe_id, slot=counts, reason=texts),
    st.builds(messages.Restored, id=maybe_id, slot=counts, cur_pos=counts),
    st.builds(messages.SnapFreed, id=maybe_id, slot=counts),
    st.builds(messages.SlotList, id=maybe_id, slots=number_lists),
    st.builds(messages.AllCleared, epoch=counts, freed=number_lists, kept=number_lists, bytes=counts),
    st.builds(messages.Parked, id=maybe_id, what=names),
    st.builds(messages.Unparked, id=maybe_id, what=names),
    st.builds(messages.DrafterFreed, id=maybe_id),
    st.builds(messages.Ok, id=maybe_id, fields=fields),
    st.builds(messages.Error, id=maybe_id, code=codes, fields=fields),
    st.builds(messages.Prefill, id=maybe_id, at=counts, of=counts),
    st.builds(messages.Cancelled, id=maybe_id, found=st.booleans()),
    st.builds(messages.Done, id=maybe_id, status=codes, fields=fields),
    st.builds(
        messages.Json,
        id=maybe_id,
        kind=st.sampled_from(["hello", "status", "props"]),
        data=st.dictionaries(st.text(max_size=6).filter(lambda key: key != "id"), json_values, max_size=3),
    ),
)

# Bytes that are nearly a conversation.
scraps = st.one_of(
    st.binary(max_size=12),
    st.sampled_from(
        [
            b"\n",
            b"\r\n",
            b" ",
            b"\t",
            b"id=r1",
            b"id=",
            b'"',
            b"\\",
            b"=",
            b",",
            b"5",
            b"-",
            b"- 5 ids=5,6",
            b"x.bin 5",
            b"RESTORE 3",
            b"SNAPSHOT",
            b"HELLO\n",
            b"park",
            b"free drafter",
            b"samp=0.7",
            b"snap=3:1",
            b"[tok] ",
            b"[snap] ",
            b"[status] {",
            b"[done] status=ok",
            b"err ",
            b"\xff",
            "é".encode(),
        ]
    ),
)
streams = st.lists(scraps, max_size=24).map(b"".join)


@given(commands)
@settings(max_examples=200)
def test_a_command_survives_its_line(command: Command) -> None:
    line = format_command(command)
    assert "\n" not in line
    assert parse_command(line) == command
    assert format_command(parse_command(line)) == line
    (received,) = DaemonConnection().receive(ClientConnection().send(command))
    assert received == command


@given(events)
@settings(max_examples=200)
def test_an_event_survives_its_line(event: Event) -> None:
    line = format_event(event)
    assert "\n" not in line
    assert parse_event(line) == event
    assert format_event(parse_event(line)) == line
    (received,) = ClientConnection().receive(DaemonConnection().send(event))
    assert received == event


def lines_in(data: bytes) -> int:
    *ended, last = data.split(b"\n")
    return len(ended) + bool(last)


def all_items(pieces: list[bytes], max_line: int) -> list[Command | RequestError]:
    daemon = DaemonConnection(max_line)
    items = [item for piece in pieces for item in daemon.receive(piece)]
    return [*items, *daemon.end()]


@given(streams, st.sampled_from([8, 40, 1000]))
@settings(max_examples=200)
def test_any_bytes_give_one_item_for_each_line(data: bytes, max_line: int) -> None:
    items = all_items([data], max_line)
    assert len(items) == lines_in(data)
    for item in items:
        assert isinstance(item, Command | RequestError)
        if isinstance(item, RequestError):
            assert item.code in CODES
            # every refusal can be answered
            answer = messages.Error(code=item.code, fields=item.fields, id=item.id)
            assert ClientConnection().receive(DaemonConnection().send(answer)) == [answer]


@given(streams, st.lists(st.integers(0, 200), max_size=6), st.sampled_from([8, 40, 1000]))
@settings(max_examples=200)
def test_cuts_do_not_count(data: bytes, cuts: list[int], max_line: int) -> None:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[start:stop] for start, stop in pairwise(edges)]
    assert list(map(comparable, all_items(pieces, max_line))) == list(
        map(comparable, all_items([data], max_line))
    )


def comparable(item: Command | RequestError) -> object:
    return (item.code, item.fields, item.id, item.verb) if isinstance(item, RequestError) else item


@given(streams, st.sampled_from([8, 40, 1000]))
@settings(max_examples=200)
def test_a_client_takes_any_bytes(data: bytes, max_line: int) -> None:
    client = ClientConnection(max_line)
    received = [*client.receive(data), *client.end()]
    assert len(received) == lines_in(data)
    assert client.malformed <= sum(isinstance(event, Unknown) for event in received)
