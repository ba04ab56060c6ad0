"""Messages <-> lines: each case is one pair that drives both directions."""

from __future__ import annotations

from array import array

import pytest

from slotd.protocol.messages import (
    AllCleared,
    Cancel,
    Cancelled,
    ChainRestored,
    Command,
    Done,
    DrafterFreed,
    Drop,
    Error,
    Event,
    FreeDrafter,
    FreeSnapshot,
    Generate,
    Hello,
    Json,
    ListSlots,
    LoadSnapshot,
    Ok,
    Park,
    Parked,
    Prefill,
    Prompt,
    Props,
    Quit,
    Ready,
    Restore,
    RestoreChain,
    Restored,
    Sampling,
    SlotList,
    Snap,
    SnapDropped,
    SnapFreed,
    SnapInline,
    SnapInlineFailed,
    SnapLoaded,
    Snapshot,
    SnapshotThin,
    SnapTaken,
    SnapThin,
    Status,
    Stored,
    TokenLogprob,
    Tokens,
    Unknown,
    Unpark,
    Unparked,
    Unsupported,
)
from slotd.protocol.wire import format_command, format_event, parse_command, parse_event

IDS = array("i", [5, 6, 7])
HASH = "00112233445566778899aabbccddeeff"

COMMANDS: list[tuple[Command, str]] = [
    (Prompt(path="/tmp/x.bin", n_gen=256), "/tmp/x.bin 256"),
    (Prompt(path="x", n_gen=0), "x 0"),
    (Prompt(path="/tmp/my file.bin", n_gen=16), '"/tmp/my file.bin" 16'),
    (Prompt(path='a"b\\c', n_gen=1), '"a\\"b\\\\c" 1'),
    (Prompt(path='a" b', n_gen=1), '"a\\" b" 1'),
    (Prompt(path="a\tb\n", n_gen=1), '"a\\tb\\n" 1'),
    (Prompt(path="é/ü.bin", n_gen=1), "é/ü.bin 1"),
    (Prompt(path="é ü.bin", n_gen=1), '"é ü.bin" 1'),
    (Prompt(path="no\u00a0break.bin", n_gen=1), '"no\\u00a0break.bin" 1'),
    (Prompt(path="-", n_gen=1), '"-" 1'),
    (Prompt(path="park", n_gen=1), '"park" 1'),
    (Prompt(path="free", n_gen=1), '"free" 1'),
    (Prompt(path="id=5", n_gen=1), '"id=5" 1'),
    (Prompt(path="123", n_gen=1), "123 1"),
    (Prompt(ids=IDS, n_gen=9), "- 9 ids=5,6,7"),
    (Prompt(ids=array("i"), n_gen=9), "- 9 ids="),
    (Prompt(ids=array("i", [-(2**31), 2**31 - 1]), n_gen=1), "- 1 ids=-2147483648,2147483647"),
    (Prompt(ids=IDS, n_gen=2**31 - 1, id="r1"), "- 2147483647 id=r1 ids=5,6,7"),
    (Prompt(path="x.bin", snap=Snap(1204, 0)), "x.bin 0 snap=1204:0"),
    (
        Prompt(path="x.bin", n_gen=5, stop=(2, 3), logprobs=20, min_tokens=5, ignore_eos=True, fit=True),
        "x.bin 5 stop=2,3 logprobs=20 min_tokens=5 ignore_eos=1 fit=1",
    ),
    (
        Prompt(
            path="x.bin", n_gen=5, sampling=Sampling(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, seed=0)
        ),
        "x.bin 5 temperature=0.7 top_k=40 top_p=0.9 min_p=0.05 seed=0",
    ),
    (
        Prompt(
            path="x.bin",
            n_gen=5,
            sampling=Sampling(
                repetition_penalty=1.1,
                penalty_window=0,
                frequency_penalty=-1e-07,
                presence_penalty=100.0,
                logit_bias=((5, -1000.0), (0, 0.1)),
                seed=2**64 - 1,
            ),
        ),
        "x.bin 5 repetition_penalty=1.1 penalty_window=0 frequency_penalty=-1e-07 presence_penalty=100.0 "
        "logit_bias=5:-1000.0,0:0.1 seed=18446744073709551615",
    ),
    (Restore(slot=3, path="x.bin", n_gen=256), "RESTORE 3 x.bin 256"),
    (Restore(slot=3, ids=IDS, n_gen=256, id="r2"), "RESTORE 3 - 256 id=r2 ids=5,6,7"),
    (Generate(path="in", n_gen=4, out="out file"), 'generate in 4 "out file"'),
    (Generate(path="-", n_gen=4, out="o", sampling=Sampling(top_k=1)), 'generate "-" 4 o top_k=1'),
    (Snapshot(slot=7), "SNAPSHOT 7"),
    (Snapshot(slot=7, of="r1", id="s"), "SNAPSHOT 7 id=s of=r1"),
    (Snapshot(slot=7, tier="disk", held=True), "SNAPSHOT 7 tier=disk held=1"),
    (Snapshot(slot=7, tier="device"), "SNAPSHOT 7 tier=device"),
    (SnapshotThin(slot=4, kv_start=64, kv_end=130), "SNAPSHOT_THIN 4 64 130"),
    (SnapshotThin(slot=4, kv_start=0, kv_end=1, of="r1", id="t"), "SNAPSHOT_THIN 4 0 1 id=t of=r1"),
    (RestoreChain(thick=2, thins=(5, 4), path="x.bin", n_gen=7), "RESTORE_CHAIN 2 5,4 x.bin 7"),
    (RestoreChain(path="x.bin", n_gen=7), "RESTORE_CHAIN -1 - x.bin 7"),
    (RestoreChain(thins=(3,), ids=IDS, id="c"), "RESTORE_CHAIN -1 3 - 0 id=c ids=5,6,7"),
    (Prompt(path="x.bin", snap=Snap(3, 1), tier="disk"), "x.bin 0 snap=3:1 tier=disk"),
    (Stored(), "STORED"),
    (LoadSnapshot(slot=3, hash=HASH), f"LOAD_SNAPSHOT 3 hash={HASH}"),
    (Drop(hash=HASH, id="d"), f"DROP id=d hash={HASH}"),
    (FreeSnapshot(slot=0), "FREE_SNAPSHOT 0"),
    (ListSlots(), "LIST_SLOTS"),
    (ListSlots(id="A.b_c:d-9"), "LIST_SLOTS id=A.b_c:d-9"),
    (Park(), "park"),
    (Park(what="draft", id="p"), "park draft id=p"),
    (Unpark(what="target"), "unpark target"),
    (FreeDrafter(), "free drafter"),
    (Hello(), "HELLO"),
    (Cancel(), "CANCEL"),
    (Cancel(id="r1"), "CANCEL id=r1"),
    (Status(id="s1"), "STATUS id=s1"),
    (Props(), "PROPS"),
    (Quit(), "quit"),
    (Unsupported(name="compress", needs_stream_end=True), "compress"),
    (Unsupported(name="compress", needs_stream_end=True, id="r"), "compress id=r"),
]

EVENTS: list[tuple[Event, str]] = [
    (Ready(), "[daemon] ready"),
    (SnapTaken(slot=0, cur_pos=12), "[snap] slot=0 cur_pos=12"),
    (SnapTaken(slot=0, cur_pos=12, id="r1"), "[snap] slot=0 cur_pos=12 id=r1"),
    (SnapTaken(slot=0, cur_pos=12, tier="host", id="r"), "[snap] slot=0 cur_pos=12 tier=host id=r"),
    (
        SnapTaken(slot=0, cur_pos=12, tier="disk", hash=HASH),
        f"[snap] slot=0 cur_pos=12 tier=disk hash={HASH}",
    ),
    (
        SnapInline(slot=0, cur_pos=12, tier="disk", hash=HASH, id="r"),
        f"[snap] inline slot=0 cur_pos=12 tier=disk hash={HASH} id=r",
    ),
    (SnapThin(slot=4, kv_start=0, kv_end=130), "[snap] thin slot=4 kv=0,130"),
    (ChainRestored(thick=-1, thins=0, cur_pos=0), "[snap] chain restored thick=-1 thins=0 cur_pos=0"),
    (
        ChainRestored(thick=2, thins=2, cur_pos=130, id="r"),
        "[snap] chain restored thick=2 thins=2 cur_pos=130 id=r",
    ),
    (SnapLoaded(slot=0, cur_pos=12, hash=HASH), f"[snap] loaded slot=0 cur_pos=12 hash={HASH}"),
    (SnapDropped(hash=HASH), f"[snap] dropped hash={HASH}"),
    (Json(kind="stored", data={"files": []}), '[stored] {"files":[]}'),
    (SnapInline(slot=1, cur_pos=1204), "[snap] inline slot=1 cur_pos=1204"),
    (SnapInlineFailed(slot=1, reason="oom"), "[snap] inline-failed slot=1 reason=oom"),
    (SnapInlineFailed(slot=1, reason="too big", id="a"), '[snap] inline-failed slot=1 reason="too big" id=a'),
    (SnapInlineFailed(slot=1, reason="7"), "[snap] inline-failed slot=1 reason=7"),
    (Restored(slot=2, cur_pos=3), "[snap] restored slot=2 cur_pos=3"),
    (SnapFreed(slot=2), "[snap] freed slot=2"),
    (SlotList(slots=(0, 3)), "[snap] slots=0,3"),
    (SlotList(), "[snap] slots="),
    (SlotList(id="l"), "[snap] slots= id=l"),
    (
        AllCleared(epoch=1, freed=(0, 3), kept=(5,), bytes=2**40),
        "[snap] all-cleared epoch=1 freed=0,3 kept=5 bytes=1099511627776",
    ),
    (AllCleared(epoch=2), "[snap] all-cleared epoch=2 freed= kept= bytes=0"),
    (Parked(what="target"), "[park] target released"),
    (Parked(what="draft", id="p"), "[park] draft released id=p"),
    (Unparked(what="target"), "[unpark] target restored"),
    (Unparked(what="draft"), "[unpark] draft restored"),
    (DrafterFreed(), "[drafter] freed"),
    (
        Ok(fields={"N": 3, "gen": 16, "prefill_s": 0.25, "out": "a b"}),
        'ok N=3 gen=16 prefill_s=0.25 out="a b"',
    ),
    (Error(code="empty_slot", fields={"slot": 4}), "err empty_slot slot=4"),
    (Error(code="unknown_command", fields={"verb": ""}, id="r"), 'err unknown_command verb="" id=r'),
    (
        Error(code="bad_args", fields={"a": "5", "b": 5, "c": 5.0, "d": "1e9", "e": "x=y"}),
        'err bad_args a="5" b=5 c=5.0 d="1e9" e="x=y"',
    ),
    (Prefill(id="r1", at=128, of=300), "[prefill] id=r1 at=128/300"),
    (Tokens(id="r1", at=0, ids=(5, 6)), "[tok] id=r1 at=0 ids=5,6"),
    (Tokens(at=7, ids=(2147483647,)), "[tok] at=7 ids=2147483647"),
    (
        Tokens(id="r1", at=1, ids=(9,), logprobs=(TokenLogprob(-0.5, ((9, -0.5), (3, -1.25))),)),
        "[tok] id=r1 at=1 ids=9 logprobs=[[-0.5,[[9,-0.5],[3,-1.25]]]]",
    ),
    (Tokens(at=1, ids=(9,), logprobs=(TokenLogprob(-1e-05, ()),)), "[tok] at=1 ids=9 logprobs=[[-1e-05,[]]]"),
    (Cancelled(id="r1", found=True), "[cancel] id=r1 found=1"),
    (Cancelled(found=False), "[cancel] found=0"),
    (
        Done(id="r1", status="stop", fields={"stop": 2, "wall_s": 0.125}),
        "[done] id=r1 status=stop stop=2 wall_s=0.125",
    ),
    (Done(status="err", fields={"code": "oom", "site": "commit"}), "[done] status=err code=oom site=commit"),
    (Json(kind="hello", data={"protocol": [1, 2]}), '[hello] {"protocol":[1,2]}'),
    (Json(kind="status", data={"a b": "\u00e9\n"}, id="s"), '[status] {"id":"s","a b":"\\u00e9\\n"}'),
    (Json(kind="props", data={}), "[props] {}"),
    (Unknown(text="[cfg] seq_verify=0  fast=1"), "[cfg] seq_verify=0  fast=1"),
    (Unknown(text=""), ""),
]


@pytest.mark.parametrize(
    ("command", "line"), COMMANDS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_command(command: Command, line: str) -> None:
    assert format_command(command) == line
    assert parse_command(line) == command
    assert type(parse_command(line)) is type(command)


@pytest.mark.parametrize(("event", "line"), EVENTS, ids=lambda value: value if isinstance(value, str) else "")
def test_event(event: Event, line: str) -> None:
    assert format_event(event) == line
    assert parse_event(line) == event
    assert type(parse_event(line)) is type(event)
