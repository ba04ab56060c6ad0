"""What a client of the source daemon sees: text replies, the token stream, and nothing of version 2."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.fakes.daemon_process import DaemonProcess

#: First characters of the lines a version 1 client waits for or registers.
KNOWN = ("[daemon] ready", "[snap] ", "[park] ", "[unpark] ", "[drafter] ", "[compress] ", "ok ", "err ")

#: What no version 1 client may ever see.
VERSION_2 = ("[tok]", "[done]", "[prefill]", "[hello]", "[status]", "[props]", "[cancel]")


@pytest.fixture
def daemon(tiny_llama: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tiny_llama, "--max-ctx=256") as process:
        yield process
        assert not [line for line in process.lines if line.startswith(VERSION_2)]
        assert all(line.startswith(KNOWN) for line in process.lines)


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    return write_prompt(tmp_path / "prompt.bin", [5, 6, 7, 8, 9, 10])


def write_prompt(path: Path, ids: list[int]) -> Path:
    path.write_bytes(np.asarray(ids, dtype="<i4").tobytes())
    return path


def next_reply(daemon: DaemonProcess, line: str) -> str:
    """Send a command that answers with one text line, and nothing on the stream."""
    daemon.send(line)
    return daemon.next_line()


def test_a_bare_prompt_streams_ids_and_ends_with_minus_one(daemon: DaemonProcess, prompt: Path) -> None:
    daemon.send(f"{prompt} 7")
    ids = daemon.read_stream()
    assert len(ids) <= 7
    assert all(0 <= token < 320 for token in ids)
    daemon.send(f"{prompt} 7")
    assert daemon.read_stream() == ids


def test_no_text_to_generate_is_legal(daemon: DaemonProcess, prompt: Path) -> None:
    daemon.send(f"{prompt} 0 snap=6:2")
    assert daemon.read_stream() == []
    assert daemon.next_line() == "[snap] inline slot=2 cur_pos=6"


def test_inline_snapshot_restore_list_free(daemon: DaemonProcess, prompt: Path) -> None:
    daemon.send(f"{prompt} 5 snap=4:3")
    fresh = daemon.read_stream()
    assert daemon.next_line() == "[snap] inline slot=3 cur_pos=4"
    assert next_reply(daemon, "LIST_SLOTS") == "[snap] slots=3"
    daemon.send(f"RESTORE 3 {prompt} 5")
    assert daemon.read_stream() == fresh
    assert daemon.next_line() == "[snap] restored slot=3 cur_pos=4"
    assert next_reply(daemon, "FREE_SNAPSHOT 3") == "[snap] freed slot=3"
    assert next_reply(daemon, "FREE_SNAPSHOT 3") == "[snap] freed slot=3"  # an empty slot too
    assert next_reply(daemon, "LIST_SLOTS") == "[snap] slots="


def test_snapshot_holds_prompt_and_answer(daemon: DaemonProcess, prompt: Path, tmp_path: Path) -> None:
    daemon.send(f"{prompt} 4")
    answer = daemon.read_stream()
    reply = next_reply(daemon, "SNAPSHOT 1")
    assert reply == f"[snap] slot=1 cur_pos={6 + len(answer)}"
    longer = write_prompt(tmp_path / "longer.bin", [5, 6, 7, 8, 9, 10, *answer, 30, 31])
    daemon.send(f"RESTORE 1 {longer} 3")
    restored = daemon.read_stream()
    assert daemon.next_line() == f"[snap] restored slot=1 cur_pos={6 + len(answer)}"
    daemon.send(f"{longer} 3")
    assert daemon.read_stream() == restored


def test_a_prompt_that_is_all_in_the_slot(daemon: DaemonProcess, prompt: Path) -> None:
    daemon.send(f"{prompt} 4 snap=6:0")
    fresh = daemon.read_stream()
    daemon.send(f"RESTORE 0 {prompt} 4")
    assert daemon.read_stream() == fresh


def test_generate_from_file_to_file(daemon: DaemonProcess, prompt: Path, tmp_path: Path) -> None:
    counted = tmp_path / "in.bin"
    counted.write_bytes(np.asarray([6, 5, 6, 7, 8, 9, 10], dtype="<i4").tobytes())
    out = tmp_path / "out.bin"
    reply = next_reply(daemon, f"generate {counted} 5 {out}")
    pattern = r"ok N=6 gen=(\d+) prefill_s=\d+\.\d+ decode_s=\d+\.\d+ decode_tok_s=\d+\.\d out=(.*)"
    match = re.fullmatch(pattern, reply)
    assert match
    assert match[2] == str(out)
    written = np.fromfile(out, dtype="<i4").tolist()
    assert written[0] == int(match[1]) == len(written) - 1
    daemon.send(f"{prompt} 5")
    assert daemon.read_stream() == written[1:]


@pytest.mark.parametrize(
    ("line", "reply", "ends_stream"),
    [
        ("nonsense", "err unknown_command verb=nonsense", True),
        ("", 'err unknown_command verb=""', True),
        ("parkour", "err unknown_command verb=parkour", True),
        ("/no/such/file 5", 'err empty_prompt path=/no/such/file reason="No such file or directory"', True),
        ("{prompt} -3", "err bad_args", True),
        ("{prompt} 5 snap=2:9", "err bad_slot slot=9 slots=8", True),
        ("{prompt} 500", "err overflow prompt=6 n_gen=500 max_ctx=256", True),
        ("RESTORE 4 {prompt} 5", "err empty_slot slot=4", True),
        ("RESTORE 44 {prompt} 5", "err bad_slot slot=44 slots=8", True),
        ("RESTORE x {prompt} 5", "err bad_args", True),
        ("SNAPSHOT 8", "err bad_slot slot=8 slots=8", False),
        ("SNAPSHOT", "err bad_args", False),
        ("SNAPSHOT 0", "err nothing_to_snapshot", False),
        ("FREE_SNAPSHOT -1", "err bad_args", False),
        ("SNAPSHOT_THIN 0 0 5", "err nothing_to_snapshot", False),
        ("SNAPSHOT_THIN 8 0 5", "err bad_slot slot=8 slots=8", False),
        ("SNAPSHOT_THIN 0 5 5", "err bad_args field=kv_end value=5", False),
        ("RESTORE_CHAIN -1 1,,3 {prompt} 5", "err bad_args field=thins", True),
        ("RESTORE_CHAIN 2 - {prompt} 5", "err empty_slot slot=2", True),
        ("RESTORE_CHAIN -1 3 {prompt} 5", "err empty_slot slot=3", True),
        ("RESTORE_CHAIN -1 3,9 {prompt} 5", "err bad_slot slot=9 slots=8", True),
        ("compress {prompt} 50 x.gguf", "err unsupported verb=compress", True),
        ("generate {prompt} 5", "err bad_args", False),
    ],
)
def test_a_refused_line_gets_one_error(
    daemon: DaemonProcess, prompt: Path, line: str, reply: str, ends_stream: bool
) -> None:
    daemon.send(line.format(prompt=prompt), "LIST_SLOTS")
    assert daemon.next_line().startswith(reply)
    assert daemon.next_line() == "[snap] slots="
    daemon.send(f"{prompt} 0")
    assert daemon.read_stream_value() == -1
    if ends_stream:
        assert daemon.read_stream_value() == -1


def test_park_and_unpark_say_what_changed(daemon: DaemonProcess, prompt: Path) -> None:
    daemon.send(f"{prompt} 5")
    before = daemon.read_stream()
    daemon.send("park")
    assert daemon.read_stream() == []
    assert daemon.next_line() == "[park] target released"
    daemon.send("park target", "park draft", "free drafter", "drafter free")
    for _ in range(4):
        assert daemon.read_stream() == []
    daemon.send(f"{prompt} 5")
    assert daemon.read_stream() == []
    assert daemon.next_line() == "err target_parked"
    daemon.send("unpark all")
    assert daemon.read_stream() == []
    assert daemon.next_line() == "[unpark] target restored"
    daemon.send(f"{prompt} 5")
    assert daemon.read_stream() == before


def test_the_sampler_tail(daemon: DaemonProcess, prompt: Path) -> None:
    answers = []
    for seed in (42, 42, 43):
        daemon.send(f"{prompt} 12 samp=1.5,0.95,0,1.1,{seed}")
        answers.append(daemon.read_stream())
    assert answers[0] == answers[1] != answers[2]


def test_commands_without_id_run_in_the_order_they_came(daemon: DaemonProcess, prompt: Path) -> None:
    daemon.send(f"{prompt} 5 snap=6:1", "nonsense", "LIST_SLOTS", f"{prompt} 0")
    first = daemon.read_stream()
    assert len(first) <= 5
    assert daemon.read_stream() == []  # of nonsense
    assert daemon.read_stream() == []
    assert [daemon.next_line() for _ in range(3)] == [
        "[snap] inline slot=1 cur_pos=6", "err unknown_command verb=nonsense", "[snap] slots=1",
    ]  # fmt: skip


def test_a_restore_of_another_text_is_refused(daemon: DaemonProcess, prompt: Path, tmp_path: Path) -> None:
    daemon.send(f"{prompt} 0 snap=6:0")
    daemon.read_stream()
    daemon.next_line()
    other = write_prompt(tmp_path / "other.bin", [5, 6, 99, 8, 9, 10, 11])
    daemon.send(f"RESTORE 0 {other} 3")
    assert daemon.read_stream() == []
    assert daemon.next_line() == "err prefix_mismatch slot=0 at=2 cur_pos=6"
    short = write_prompt(tmp_path / "short.bin", [5, 6, 7])
    daemon.send(f"RESTORE 0 {short} 3")
    assert daemon.read_stream() == []
    assert daemon.next_line() == "err prefix_shorter slot=0 prompt=3 cur_pos=6"


def test_without_a_stream_a_prompt_is_refused_by_name(tiny_llama: Path, prompt: Path) -> None:
    with DaemonProcess(tiny_llama, stream=False) as daemon:
        daemon.send(f"{prompt} 5", "LIST_SLOTS")
        assert daemon.next_line() == "err no_stream_fd"
        assert daemon.next_line() == "[snap] slots="


def test_the_source_command_line_is_accepted_and_what_is_inactive_is_said(
    tiny_llama: Path, prompt: Path
) -> None:
    flags = "missing-draft.safetensors --daemon --fast-rollback --ddtree --ddtree-budget=22 --max-ctx=128"
    flags += " -ctk f16 --cache-type-v=f16 --fa-window 1024 --target-gpu=0"
    with DaemonProcess(tiny_llama, *flags.split()) as daemon:
        daemon.send(f"{prompt} 3")
        assert len(daemon.read_stream()) <= 3
        daemon.send("PROPS")
        props = daemon.wait_json("props")
        inactive = {entry["name"]: entry for entry in props["inactive"]}
        assert set(inactive) == {"--fast-rollback", "--fa-window", "--target-gpu"}
        assert all(entry["reason"] for entry in inactive.values())
        speculation = props["speculation"]
        assert (speculation["spec"], speculation["modes"], speculation["draft"]) == ("tree", [], None)
        assert (speculation["budget"], "missing-draft.safetensors" in speculation["reason"]) == (22, True)
        without = [line for line in daemon.stderr.splitlines() if line.startswith("slotd: speculation: off")]
        assert len(without) == 1
        assert "missing-draft.safetensors" in without[0]
        said = [line for line in daemon.stderr.splitlines() if "not active" in line]
        assert len(said) == 1
        assert all(name in said[0] for name in inactive)
