from __future__ import annotations

import json
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotd.daemon.link import (
    Emit,
    Failed,
    Finished,
    Flags,
    Line,
    Opened,
    Ping,
    Progress,
    Started,
    State,
    Stop,
    Submit,
    ToEngine,
    ToFront,
)
from slotd.daemon.link_wire import (
    Frames,
    decode_to_engine,
    decode_to_front,
    encode_to_engine,
    encode_to_front,
)
from slotd.protocol.messages import (
    AllCleared,
    Command,
    Drop,
    FreeDrafter,
    FreeSnapshot,
    Json,
    ListSlots,
    LoadSnapshot,
    Park,
    Prompt,
    Restore,
    RestoreChain,
    Sampling,
    Snap,
    SnapInlineFailed,
    Snapshot,
    SnapshotThin,
    SnapTaken,
    Stored,
    TokenLogprob,
    Unpark,
)

HASH = "00112233445566778899aabbccddeeff"

TO_FRONT: list[ToFront] = [
    Opened(320, 512, True, {"model": {"identity": "x"}, "verbs": ["HELLO"]}),
    Failed("ModelError", "tiny.gguf: cut"),
    Started("r1"),
    Started(7),
    Progress("r1", 5, 9),
    Emit(3, 0, (5,)),
    Emit("r1", 12, (5, 6, 319)),
    Emit("r1", 1, (5, 6), (TokenLogprob(-0.1, ((5, -0.1), (6, -2.5))), TokenLogprob(float("-inf"), ()))),
    Line(SnapTaken(slot=3, cur_pos=12, tier="disk", hash=HASH), "r1"),
    Line(SnapInlineFailed(slot=0, reason="host full = no"), 4),
    Line(AllCleared(epoch=2, freed=(1, 2), kept=(), bytes=99)),
    Line(Json(kind="stored", data={"files": [{"hash": HASH}], "read_only": ""}), 5),
    Finished("r1", "stop", None, {"stop": 2}, {"gen": 3, "wall_s": 0.1 + 0.2}),
    Finished(1, "err", "internal", {"reason": 'a "quoted" \ud800 text'}),
]

COMMANDS: list[Command] = [
    Prompt(id="r1", path="/no/such/file", n_gen=5),
    Prompt(ids=array("i", range(1000)), n_gen=0, snap=Snap(3, 4), tier="host"),
    Prompt(
        id="a", n_gen=9, sampling=Sampling(temperature=0.1 + 0.2, logit_bias=((5, -1.5),), seed=2**64 - 1)
    ),
    Prompt(ids=[1], n_gen=7, stop=(4, 5), logprobs=3, min_tokens=7, ignore_eos=True, fit=True),
    Restore(slot=3, ids=[1], n_gen=2),
    RestoreChain(thick=-1, thins=(4, 5), path="x", n_gen=2),
    Snapshot(slot=2, of="r1", tier="disk", held=True),
    SnapshotThin(id="z", slot=2, kv_start=3, kv_end=9),
    FreeSnapshot(slot=1),
    ListSlots(id="q"),
    Stored(),
    LoadSnapshot(slot=1, hash=HASH),
    Drop(hash=HASH),
    Park(what="target"),
    Unpark(),
    FreeDrafter(),
]


def through(data: bytes, parts: int = 1) -> list[tuple[dict[str, Any], bytes]]:
    frames, size = Frames(), max(1, -(-len(data) // parts))
    return [frame for at in range(0, len(data), size) for frame in frames.feed(data[at : at + size])]


def to_engine(message: ToEngine | Ping) -> ToEngine | Ping:
    ((header, ids),) = through(encode_to_engine(message, 42))
    return decode_to_engine(header, ids, lambda at: Flags(bytearray(100), at))


@pytest.mark.parametrize("message", TO_FRONT, ids=lambda message: type(message).__name__)
def test_what_the_engine_says_arrives_as_it_was(message: ToFront) -> None:
    ((header, ids),) = through(encode_to_front(message))
    assert decode_to_front(header, ids) == message


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_commands_arrive_as_they_were_and_prompts_as_ids(command: Command) -> None:
    ids = np.arange(70_000, dtype=np.int32) if isinstance(command, Prompt) else None
    got = to_engine(Submit("k", command, Flags(), 12.25, ids))
    assert isinstance(got, Submit)
    assert (got.key, got.submitted_at) == ("k", 12.25)
    if isinstance(command, Prompt):
        assert got.ids is not None
        assert got.ids.dtype == np.int32
        assert np.array_equal(got.ids, np.arange(70_000))
        assert isinstance(got.command, Prompt)
        assert (got.command.path, got.command.ids) == (None, None)
        names = [name for name in type(command).__dataclass_fields__ if name not in ("path", "ids")]
        assert all(getattr(got.command, name) == getattr(command, name) for name in names)
        assert type(got.command) is type(command)
    else:
        assert got.ids is None
        assert got.command == command


def test_a_place_for_flags_arrives() -> None:
    cells = bytearray(100)
    cells[43] = 1
    ((header, ids),) = through(encode_to_engine(Submit(1, ListSlots(), Flags(), 0.0), 42))
    got = decode_to_engine(header, ids, lambda at: Flags(cells, at))
    assert isinstance(got, Submit)
    assert (got.flags.cancelled, got.flags.paused) == (False, True)


@pytest.mark.parametrize("message", [Stop(), Ping()])
def test_messages_without_fields(message: ToEngine | Ping) -> None:
    assert to_engine(message) == message


def test_state_has_another_way() -> None:
    with pytest.raises(TypeError):
        encode_to_front(State({}))


@given(st.integers(1, 60), st.lists(st.sampled_from(TO_FRONT), max_size=6))
def test_frames_are_cut_wherever_the_bytes_are(parts: int, messages: list[ToFront]) -> None:
    data = b"".join(map(encode_to_front, messages))
    assert [decode_to_front(header, ids) for header, ids in through(data, parts)] == messages


def test_the_end_of_a_stream_may_cut_a_frame() -> None:
    data = encode_to_front(Started(1)) + encode_to_front(Started(2))
    assert [json.dumps(header) for header, _ in through(data[:-1])] == ['{"m": "started", "key": 1}']
