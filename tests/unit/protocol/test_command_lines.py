"""Lines that say a command in other ways, lines that are refused, and commands that cannot be sent."""

from __future__ import annotations

import time
import tracemalloc
from array import array
from typing import Any

import pytest

from slotd.protocol.command_lines import format_command, parse_command, refuse
from slotd.protocol.errors import CODES, LocalProtocolError, RequestError
from slotd.protocol.event_lines import format_event, parse_event
from slotd.protocol.messages import (
    Command,
    Drop,
    Error,
    FreeDrafter,
    LoadSnapshot,
    Park,
    Prompt,
    Quit,
    Restore,
    Sampling,
    Snap,
    Snapshot,
    SnapshotThin,
    Unsupported,
)

IDS = array("i", [5, 6, 7])

#: How errors write the usual limits.
COUNT = "0..2147483647"
INT32 = "-2147483648..2147483647"


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("  x.bin \t 16  ", Prompt(path="x.bin", n_gen=16)),
        ("prompt 16", Prompt(path="prompt", n_gen=16)),
        ("x=5 16", Prompt(path="x=5", n_gen=16)),
        ('a"b 16', Prompt(path='a"b', n_gen=16)),
        ('"\\u00e9" 007', Prompt(path="é", n_gen=7)),
        ('x.bin 16 id="r1"', Prompt(path="x.bin", n_gen=16, id="r1")),
        (
            "x.bin 16 snap=3:1 samp=0.7",
            Prompt(path="x.bin", n_gen=16, snap=Snap(3, 1), sampling=Sampling(temperature=0.7)),
        ),
        (
            "x.bin 16 samp=0.7000,0.9500,40,1.1000,42",
            Prompt(
                path="x.bin",
                n_gen=16,
                sampling=Sampling(temperature=0.7, top_p=0.95, top_k=40, repetition_penalty=1.1, seed=42),
            ),
        ),
        (
            "RESTORE 1 x.bin 16 samp=0,1,0,1,0,0.5,-0.5 min_p=0.1 id=q",
            Restore(
                slot=1,
                path="x.bin",
                n_gen=16,
                id="q",
                sampling=Sampling(frequency_penalty=0.5, presence_penalty=-0.5, min_p=0.1),
            ),
        ),
        ("drafter free", FreeDrafter()),
        ("exit", Quit()),
        ("park all", Park()),
        (
            "compress /tmp/x.bin 500 d.gguf qwen3-0.6b nopark id=c",
            Unsupported(name="compress", needs_stream_end=True, id="c"),
        ),
    ],
)
def test_other_ways_to_say_a_command(line: str, command: Command) -> None:
    assert parse_command(line) == command


REFUSED: list[tuple[str, str, str, dict[str, Any]]] = [
    # line, code, verb, fields
    ("", "unknown_command", "", {"verb": ""}),
    (" \t ", "unknown_command", "", {"verb": ""}),
    ("parkour", "unknown_command", "", {"verb": "parkour"}),
    ("free x", "unknown_command", "", {"verb": "free"}),
    ("PROMPT x 5.0", "unknown_command", "", {"verb": "PROMPT"}),
    ("y" * 99, "unknown_command", "", {"verb": "y" * 40}),
    ("/tmp/x.bin", "bad_args", "PROMPT", {"field": "n_gen", "reason": "missing"}),
    (
        "RESTORE_CHAIN -1 1,,3 x 5",
        "bad_args",
        "RESTORE_CHAIN",
        {"field": "thins", "value": "", "limit": COUNT},
    ),
    (
        "RESTORE_CHAIN -1 1,3, x 5",
        "bad_args",
        "RESTORE_CHAIN",
        {"field": "thins", "value": "", "limit": COUNT},
    ),
    (
        "RESTORE_CHAIN -1 1,b x 5",
        "bad_args",
        "RESTORE_CHAIN",
        {"field": "thins", "value": "b", "limit": COUNT},
    ),
    ("RESTORE_CHAIN -1 -1 x 5", "bad_args", "RESTORE_CHAIN", {"field": "thins", "value": -1, "limit": COUNT}),
    (
        "RESTORE_CHAIN -2 - x 5",
        "bad_args",
        "RESTORE_CHAIN",
        {"field": "thick", "value": -2, "limit": "-1..2147483647"},
    ),
    ("RESTORE_CHAIN -1 - x", "bad_args", "RESTORE_CHAIN", {"field": "n_gen", "reason": "missing"}),
    (
        "SNAPSHOT_THIN 0 5 5",
        "bad_args",
        "SNAPSHOT_THIN",
        {"field": "kv_end", "value": 5, "limit": "6..2147483647"},
    ),
    ("SNAPSHOT_THIN 0 -1 5", "bad_args", "SNAPSHOT_THIN", {"field": "kv_start", "value": -1, "limit": COUNT}),
    (
        "SNAPSHOT 0 tier=tape",
        "bad_args",
        "SNAPSHOT",
        {"field": "tier", "value": "tape", "limit": "device|host|disk"},
    ),
    ("DROP", "bad_args", "DROP", {"field": "hash", "reason": "missing"}),
    ("LOAD_SNAPSHOT 1", "bad_args", "LOAD_SNAPSHOT", {"field": "hash", "reason": "missing"}),
    (
        "DROP hash=00112233445566778899AABBCCDDEEFF",
        "bad_args",
        "DROP",
        {"field": "hash", "value": "00112233445566778899AABBCCDDEEFF"},
    ),
    ("x.bin many", "bad_args", "PROMPT", {"field": "n_gen", "value": "many", "limit": COUNT}),
    ("- id=r1", "bad_args", "PROMPT", {"field": "n_gen", "reason": "missing"}),
    ("x -1", "bad_args", "PROMPT", {"field": "n_gen", "value": -1, "limit": COUNT}),
    ("x 2147483648", "bad_args", "PROMPT", {"field": "n_gen", "value": 2147483648, "limit": COUNT}),
    ("x 1_0 ", "unknown_command", "", {"verb": "x"}),
    ("x.bin 1_0", "bad_args", "PROMPT", {"field": "n_gen", "value": "1_0", "limit": COUNT}),
    ("x.bin \u0661", "bad_args", "PROMPT", {"field": "n_gen", "value": "\u0661", "limit": COUNT}),
    ("x 5 6", "bad_args", "PROMPT", {"word": 6, "reason": "unexpected"}),
    ('"" 5', "bad_args", "PROMPT", {"field": "path", "value": ""}),
    ('"a\\u0000b" 5', "bad_args", "PROMPT", {"field": "path", "value": "a\0b"}),
    ('"\\ud800" 5', "bad_args", "PROMPT", {"field": "path", "value": "\ud800"}),
    ('"open 5', "bad_args", "PROMPT", {"field": "path", "value": '"open', "reason": "not_a_json_string"}),
    ('"a"b 5', "bad_args", "PROMPT", {"field": "path", "value": '"a"b', "reason": "not_a_json_string"}),
    ("id=5 5", "bad_args", "PROMPT", {"field": "path", "reason": "missing"}),
    ("x 5 ids=1", "bad_args", "PROMPT", {"field": "ids", "reason": "path_given"}),
    ("- 5", "bad_args", "PROMPT", {"field": "ids", "reason": "missing"}),
    ("- 5 ids=1,,2", "bad_args", "PROMPT", {"field": "ids", "value": "", "limit": INT32}),
    ("- 5 ids=1,", "bad_args", "PROMPT", {"field": "ids", "value": "", "limit": INT32}),
    ("- 5 ids=1,2147483648", "bad_args", "PROMPT", {"field": "ids", "value": 2147483648, "limit": INT32}),
    ("- 5 ids=1_0", "bad_args", "PROMPT", {"field": "ids", "value": "1_0", "limit": INT32}),
    ("- 5 ids=1,\u0662", "bad_args", "PROMPT", {"field": "ids", "value": "\u0662", "limit": INT32}),
    ("- 5 ids=4-2", "bad_args", "PROMPT", {"field": "ids", "value": "4-2", "limit": INT32}),
    ("x 5 top_p=1.5", "bad_args", "PROMPT", {"field": "top_p", "value": 1.5, "limit": "(0..1]"}),
    ("x 5 top_p=0", "bad_args", "PROMPT", {"field": "top_p", "value": 0, "limit": "(0..1]"}),
    (
        "x 5 temperature=nan",
        "bad_args",
        "PROMPT",
        {"field": "temperature", "value": "nan", "limit": "0..100"},
    ),
    (
        "x 5 temperature=inf",
        "bad_args",
        "PROMPT",
        {"field": "temperature", "value": "inf", "limit": "0..100"},
    ),
    (
        "x 5 temperature=1e999",
        "bad_args",
        "PROMPT",
        {"field": "temperature", "value": "1e999", "limit": "0..100"},
    ),
    (
        "x 5 temperature=-0.1",
        "bad_args",
        "PROMPT",
        {"field": "temperature", "value": -0.1, "limit": "0..100"},
    ),
    ("x 5 temperature=", "bad_args", "PROMPT", {"field": "temperature", "value": "", "limit": "0..100"}),
    ("x 5 top_k=1.0", "bad_args", "PROMPT", {"field": "top_k", "value": 1.0, "limit": COUNT}),
    (
        "x 5 repetition_penalty=0",
        "bad_args",
        "PROMPT",
        {"field": "repetition_penalty", "value": 0, "limit": "(0..100]"},
    ),
    (
        "x 5 seed=18446744073709551616",
        "bad_args",
        "PROMPT",
        {"field": "seed", "value": 18446744073709551616, "limit": "0..18446744073709551615"},
    ),
    ("x 5 fit=2", "bad_args", "PROMPT", {"field": "fit", "value": 2, "limit": "0|1"}),
    ("x 5 logprobs=21", "bad_args", "PROMPT", {"field": "logprobs", "value": 21, "limit": "0..20"}),
    ("x 5 min_tokens=6", "bad_args", "PROMPT", {"field": "min_tokens", "value": 6, "limit": "0..5"}),
    ("x 5 stop=", "bad_args", "PROMPT", {"field": "stop", "value": "", "limit": COUNT}),
    ("x 5 stop=" + ",".join(["1"] * 65), "bad_args", "PROMPT", {"field": "stop", "count": 65, "most": 64}),
    ("x 5 stop=-1", "bad_args", "PROMPT", {"field": "stop", "value": -1, "limit": COUNT}),
    (
        "x 5 logit_bias=1:2,1:3",
        "bad_args",
        "PROMPT",
        {"field": "logit_bias", "value": 1, "reason": "repeated"},
    ),
    ("x 5 logit_bias=1", "bad_args", "PROMPT", {"field": "logit_bias", "value": 1, "limit": "-1000..1000"}),
    (
        "x 5 logit_bias=1:1001",
        "bad_args",
        "PROMPT",
        {"field": "logit_bias", "value": 1001, "limit": "-1000..1000"},
    ),
    (
        "x 5 logit_bias=" + ",".join(f"{i}:1" for i in range(1025)),
        "bad_args",
        "PROMPT",
        {"field": "logit_bias", "count": 1025, "most": 1024},
    ),
    ("x 5 snap=0:1", "bad_args", "PROMPT", {"field": "snap", "value": 0, "limit": "1..2147483647"}),
    ("x 5 snap=1:-1", "bad_args", "PROMPT", {"field": "snap", "value": -1, "limit": COUNT}),
    ("x 5 snap=5", "bad_args", "PROMPT", {"field": "snap", "value": 5, "reason": "not_at_colon_slot"}),
    ("x 5 samp=", "bad_args", "PROMPT", {"field": "temperature", "value": "", "limit": "0..100"}),
    ("x 5 samp=1,2", "bad_args", "PROMPT", {"field": "top_p", "value": 2, "limit": "(0..1]"}),
    ("x 5 samp=1,1,1,1,1,1,1,1", "bad_args", "PROMPT", {"field": "samp", "count": 8, "most": 7}),
    ("x 5 samp=1 temperature=1", "bad_args", "PROMPT", {"field": "temperature", "reason": "also_in_samp"}),
    ("x 5 seed=1 samp=1,1,0,1,0", "bad_args", "PROMPT", {"field": "seed", "reason": "also_in_samp"}),
    ("x 5 foo=1", "bad_args", "PROMPT", {"field": "foo", "reason": "unknown"}),
    ("x 5 of=r1", "bad_args", "PROMPT", {"field": "of", "reason": "not_taken"}),
    ("x 5 top_k=1 top_k=1", "bad_args", "PROMPT", {"field": "top_k", "reason": "repeated"}),
    ("RESTORE", "bad_args", "RESTORE", {"field": "slot", "reason": "missing"}),
    ("RESTORE 3 x", "bad_args", "RESTORE", {"field": "n_gen", "reason": "missing"}),
    ("RESTORE -1 x 5", "bad_args", "RESTORE", {"field": "slot", "value": -1, "limit": COUNT}),
    ("RESTORE 3 - 5", "bad_args", "RESTORE", {"field": "ids", "reason": "missing"}),
    ("generate - 5", "bad_args", "generate", {"field": "out", "reason": "missing"}),
    ("generate i 5 o ids=1", "bad_args", "generate", {"field": "ids", "reason": "not_taken"}),
    ("SNAPSHOT", "bad_args", "SNAPSHOT", {"field": "slot", "reason": "missing"}),
    ("SNAPSHOT x", "bad_args", "SNAPSHOT", {"field": "slot", "value": "x", "limit": COUNT}),
    ("SNAPSHOT 1 of=", "bad_args", "SNAPSHOT", {"field": "of", "value": ""}),
    ("LIST_SLOTS now", "bad_args", "LIST_SLOTS", {"word": "now", "reason": "unexpected"}),
    ("park drafts", "bad_args", "park", {"field": "what", "value": "drafts", "limit": "all|draft|target"}),
    ("park x=1", "bad_args", "park", {"field": "x", "reason": "unknown"}),
    ("free drafter now", "bad_args", "free drafter", {"word": "now", "reason": "unexpected"}),
    ("STATUS id=", "bad_id", "STATUS", {"field": "id", "value": ""}),
    ("STATUS id=a/b", "bad_id", "STATUS", {"field": "id", "value": "a/b"}),
    ("STATUS id=" + "r" * 65, "bad_id", "STATUS", {"field": "id", "value": "r" * 40}),
    ('STATUS id="a b"', "bad_id", "STATUS", {"field": "id", "value": "a b"}),
    ("compress x id=!", "bad_id", "compress", {"field": "id", "value": "!"}),
]


@pytest.mark.parametrize(("line", "code", "verb", "fields"), REFUSED, ids=[case[0][:40] for case in REFUSED])
def test_a_refused_command_names_the_culprit(line: str, code: str, verb: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        parse_command(line)
    error = caught.value
    assert (error.code, error.verb, error.fields) == (code, verb, fields)
    assert error.code in CODES
    assert [type(value) for value in error.fields.values()] == [type(value) for value in fields.values()]
    # and the answer can be put on the wire
    sent = Error(code=error.code, fields=error.fields)
    assert parse_event(format_event(sent)) == sent
    format_event(sent).encode()


@pytest.mark.parametrize(
    ("line", "request_id"),
    [
        ("x 5 top_p=7 id=r1", "r1"),
        ("RESTORE id=r1", "r1"),
        ("nonsense id=r1", "r1"),
        ("- id=r1", "r1"),
        ('x "5 id=r1', "r1"),
        ("x 5 id=r1 id=r2", "r1"),
        ("x 5 id=! id=r2", "r2"),
        ("x 5 id=!", None),
        ('"a id=r1" 5 foo=1', None),
        ("x.bin", None),
        ("CANCEL id=r1 x=5", None),  # the id is another request's: its [done] must not be printed for this
    ],
)
def test_a_refusal_carries_the_id_of_its_line(line: str, request_id: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        parse_command(line)
    assert caught.value.id == request_id


@pytest.mark.parametrize(
    ("text", "verb", "request_id"),
    [
        ("", "", None),
        ("nonsense id=r1", "", "r1"),
        ("- 256 id=r1", "PROMPT", "r1"),
        ("SNAPSHOT \ufffd id=r1", "SNAPSHOT", "r1"),
        ("CANCEL id=r1 \ufffd", "CANCEL", None),
    ],
)
def test_a_line_that_cannot_be_parsed_is_refused_for_its_request(
    text: str, verb: str, request_id: str | None
) -> None:
    error = refuse("bad_utf8", text, {"limit": 5})
    assert (error.code, error.verb, error.id, error.fields) == ("bad_utf8", verb, request_id, {"limit": 5})


UNSENDABLE: list[Command] = [
    Command(),
    Prompt(),
    Prompt(path="x", ids=IDS),
    Prompt(path="x", n_gen=-1),
    Prompt(path="x", n_gen=2.5),  # type: ignore[arg-type]
    Prompt(path="", n_gen=1),
    Prompt(path="a\0b", n_gen=1),
    Prompt(path="\udc80", n_gen=1),
    Prompt(path="x", id="a b"),
    Prompt(path="x", id=""),
    Prompt(ids=[1, 2**31]),
    Prompt(ids=[1.5]),  # type: ignore[list-item]
    Prompt(path="x", snap=Snap(0, 1)),
    Prompt(path="x", n_gen=1, min_tokens=2),
    Prompt(path="x", stop=tuple(range(65))),
    Prompt(path="x", logprobs=21),
    Prompt(path="x", sampling=Sampling(temperature=float("nan"))),
    Prompt(path="x", sampling=Sampling(temperature=float("inf"))),
    Prompt(path="x", sampling=Sampling(top_p=0.0)),
    Prompt(path="x", sampling=Sampling(logit_bias=((1, 2.0), (1, 3.0)))),
    Prompt(path="x", sampling=Sampling(seed=2**64)),
    Snapshot(slot=-1),
    Park(what="everything"),
    SnapshotThin(slot=0, kv_start=5, kv_end=5),
    LoadSnapshot(slot=0),
    Drop(hash="../../etc/passwd"),
    Unsupported(name="park"),
]


@pytest.mark.parametrize("command", UNSENDABLE, ids=repr)
def test_a_command_that_cannot_be_sent(command: Command) -> None:
    with pytest.raises(LocalProtocolError):
        format_command(command)


def test_bytes_are_ids_and_no_machine_words() -> None:
    assert format_command(Prompt(ids=b"\x05\x06\x07\x08", n_gen=1)) == "- 1 ids=5,6,7,8"


# --------------------------------------------------------------------------------------------------
# Speed. The bounds are an order of magnitude above what an idle machine takes: they catch a line that is
# walked once for each id, or a regular expression that backtracks, and nothing finer.


def test_a_prompt_of_200_000_ids_is_quick() -> None:
    line = "- 1 ids=" + ",".join(str(i * 7919 % 150_000) for i in range(200_000))
    began = time.perf_counter()
    command = parse_command(line)
    took = time.perf_counter() - began
    assert isinstance(command, Prompt)
    assert command.ids is not None
    assert len(command.ids) == 200_000
    assert took < 1.0
    assert format_command(command) == line


def test_a_line_of_many_words_is_not_cut_into_all_of_them() -> None:
    line = "x 5 " + "ab " * 500_000
    tracemalloc.start()
    try:
        with pytest.raises(RequestError):
            parse_command(line)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_a_line_may_have_every_field_there_is() -> None:
    fields = (
        "snap=1:2 samp=1,1,1,1,1,1,1 min_p=0 penalty_window=1 logit_bias=1:1 stop=1 logprobs=1 min_tokens=1"
    )
    command = parse_command(f"RESTORE 1 - 5 id=r ids=5 {fields} ignore_eos=1 fit=1")
    assert isinstance(command, Restore)
    assert command.fit


@pytest.mark.parametrize(
    "line",
    [
        "9" * 2_000_000,
        "- 5 ids=" + "9" * 2_000_000,
        "x 5 temperature=" + "9" * 2_000_000,
        "a " * 1_000_000,
        "x 5 stop=" + "1," * 1_000_000,
        '"\\' * 1_000_000,
        'x 3 a="b"c ' * 200_000,
        "x 5 " + "k" * 2_000_000,
    ],
    ids=lambda line: line[:16],
)
def test_a_hostile_line_is_refused_quickly(line: str) -> None:
    began = time.perf_counter()
    with pytest.raises(RequestError) as caught:
        parse_command(line)
    assert time.perf_counter() - began < 2.0
    assert len(format_event(Error(code=caught.value.code, fields=caught.value.fields))) < 400
