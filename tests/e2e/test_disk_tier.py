"""Snapshots on disk, through the real daemon: they survive it, and a file that is wrong harms nothing."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from slotd.daemon.weights.reader import open_model
from slotd.protocol.messages import Done, Error, Event, Json, SnapDropped, SnapInline, SnapLoaded, SnapTaken
from slotd.protocol.slot_identity import slot_hash
from slotd.protocol.wire import parse_event
from tests.fakes.daemon_process import DaemonProcess
from tests.fakes.tiny_gguf import write_tiny_llama

IDS = random.Random(4).choices(range(3, 259), k=200)
N_GEN = 12


def joined(ids: list[int]) -> str:
    return ",".join(map(str, ids))


def start(model: Path, folder: Path, *flags: str, **options: Any) -> DaemonProcess:
    return DaemonProcess(model, f"--slot-dir={folder}", "--exact", *flags, **options)


def ask(daemon: DaemonProcess, line: str) -> Event:
    """The reply line of a command without id (version 1)."""
    daemon.send(line)
    return parse_event(daemon.next_line())


def error_of(daemon: DaemonProcess, line: str) -> tuple[str, dict[str, Any]]:
    event = ask(daemon, line)
    assert isinstance(event, Error), event
    return event.code, dict(event.fields)


def prefill(daemon: DaemonProcess, ids: list[int], fields: str = "") -> None:
    """Compute a prompt on the token stream."""
    daemon.send(f"- 0 ids={joined(ids)} {fields}".rstrip())
    assert daemon.read_stream() == []


def save(daemon: DaemonProcess, ids: list[int] = IDS, slot: int = 0) -> str:
    """Compute a prompt, keep it in a slot and on disk; returns its hash."""
    prefill(daemon, ids)
    taken = ask(daemon, f"SNAPSHOT {slot} tier=disk")
    assert isinstance(taken, SnapTaken), taken
    assert (taken.slot, taken.cur_pos, taken.tier) == (slot, len(ids), "disk")
    assert taken.hash
    return taken.hash


def save_with_logits(daemon: DaemonProcess) -> str:
    """Keep a prompt in slot 0 and on disk with the logits that follow; returns its hash."""
    prefill(daemon, IDS, "snap=200:0 tier=disk")
    event = parse_event(daemon.next_line())
    assert isinstance(event, SnapInline), event
    assert event.hash
    return event.hash


def stored(daemon: DaemonProcess) -> dict[str, Any]:
    event = ask(daemon, "STORED")
    assert isinstance(event, Json), event
    return dict(event.data)


def restored(daemon: DaemonProcess, ids: list[int], slot: int = 0) -> tuple[list[int], Done]:
    """The answer to a prompt that starts from a slot."""
    daemon.send(f"RESTORE {slot} - {N_GEN} ids={joined(ids)} id=restored ignore_eos=1")
    produced: list[int] = []

    def collect(event: Event) -> bool:
        produced.extend(getattr(event, "ids", ()))
        return isinstance(event, Done) and event.id == "restored"

    done = daemon.wait_event(collect)
    assert isinstance(done, Done)
    return produced, done


# --------------------------------------------------------------------------------------------------
# It survives the daemon


@pytest.mark.parametrize("more", [[], [9, 8, 7]])
def test_a_snapshot_survives_kill_and_the_prompt_is_not_computed_again(
    tiny_llama: Path, tmp_path: Path, more: list[int]
) -> None:
    """Field report 18."""
    with start(tiny_llama, tmp_path) as daemon:
        name = save(daemon)
        expected, _ = restored(daemon, IDS + more)
        daemon.process.send_signal(signal.SIGKILL)
        daemon.wait_exit()
    with start(tiny_llama, tmp_path) as daemon:
        assert ask(daemon, "LIST_SLOTS").slots == ()  # type: ignore[attr-defined]
        assert ask(daemon, f"LOAD_SNAPSHOT 3 hash={name}") == SnapLoaded(slot=3, cur_pos=200, hash=name)
        produced, done = restored(daemon, IDS + more, slot=3)
        assert produced == expected
        # Nothing but what is new was computed; SNAPSHOT of a prompt without an answer keeps no logits.
        assert done.fields["reused"] == (200 if more else 199)
    with DaemonProcess(tiny_llama, "--exact") as daemon:
        assert daemon.generate(IDS + more, N_GEN, "ignore_eos=1")[0] == expected


def test_a_prompt_that_is_all_of_a_stored_snapshot_computes_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    with start(tiny_llama, tmp_path) as daemon:
        name = save_with_logits(daemon)
        expected = restored(daemon, IDS)[0]
    with start(tiny_llama, tmp_path) as daemon:
        assert isinstance(ask(daemon, f"LOAD_SNAPSHOT 1 hash={name}"), SnapLoaded)
        produced, done = restored(daemon, IDS, slot=1)
        assert (produced, done.fields["reused"]) == (expected, 200)


def test_the_hash_is_the_one_that_a_client_computes(tiny_llama: Path, tmp_path: Path) -> None:
    with start(tiny_llama, tmp_path, "-ctk", "f16") as daemon:
        daemon.send("PROPS")
        props = daemon.wait_json("props")
        name = save(daemon)
        kv = props["kv"]
        assert name == slot_hash(props["model"]["identity"], kv["k"], kv["v"], kv["window"], IDS)
        (file,) = stored(daemon)["files"]
        assert (file["hash"], file["k"], file["v"], file["length"]) == (name, "f16", "f32", 200)
        assert file["model"] == props["model"]["identity"]
        assert props["slot_dir"] == {"path": str(tmp_path), "budget": None, "read_only": ""}


def test_a_slot_that_is_held_goes_to_disk_and_stays(tiny_llama: Path, tmp_path: Path) -> None:
    with start(tiny_llama, tmp_path) as daemon:
        prefill(daemon, IDS)
        assert ask(daemon, "SNAPSHOT 2") == SnapTaken(slot=2, cur_pos=200)
        prefill(daemon, [5] * 30)
        taken = ask(daemon, "SNAPSHOT 2 tier=disk held=1")
        assert isinstance(taken, SnapTaken)
        assert (taken.cur_pos, taken.tier) == (200, "disk")
        expected, done = restored(daemon, IDS, slot=2)
        assert done.fields["reused"] == 199
        assert ask(daemon, "FREE_SNAPSHOT 2").slot == 2  # type: ignore[attr-defined]
        assert len(stored(daemon)["files"]) == 1  # the file is not the slot's
        assert isinstance(ask(daemon, f"LOAD_SNAPSHOT 2 hash={taken.hash}"), SnapLoaded)
        assert restored(daemon, IDS, slot=2)[0] == expected


def test_an_inline_snapshot_is_on_disk_before_the_request_ends(tiny_llama: Path, tmp_path: Path) -> None:
    with start(tiny_llama, tmp_path) as daemon:
        daemon.send(f"- 3 ids={joined(IDS)} id=r ignore_eos=1 snap=130:1 tier=disk")
        lines = []
        while not lines or not lines[-1].startswith("[done]"):
            lines.append(daemon.next_line())
        (event,) = [parse_event(line) for line in lines if line.startswith("[snap]")]
        assert isinstance(event, SnapInline)
        assert (event.slot, event.cur_pos, event.tier, event.id) == (1, 130, "disk", "r")
        assert [file["hash"] for file in stored(daemon)["files"]] == [event.hash]
        assert (tmp_path / f"{event.hash}.slot").exists()
        prefill(daemon, IDS, "snap=140:1 tier=device")
        assert daemon.next_line() == "[snap] inline slot=1 cur_pos=140 tier=device"


@pytest.mark.skipif(
    not Path("/proc/self/io").exists(), reason="the kernel does not count writes (/proc/PID/io)"
)
@pytest.mark.parametrize("turn", [20, 35])
def test_fifty_growing_turns_write_little_more_than_the_last_state(
    tiny_llama: Path, tmp_path: Path, turn: int
) -> None:
    """Field report 28, counted by the kernel: all that the daemon writes, its replies included."""
    ids = random.Random(5).choices(range(3, 259), k=50 * turn)
    with start(tiny_llama, tmp_path, "--max-ctx=2048") as daemon:
        before = bytes_written(daemon)
        for number in range(1, 51):
            prefill(daemon, ids[: number * turn], f"snap={number * turn}:0 tier=disk")
            assert isinstance(parse_event(daemon.next_line()), SnapInline)
        written = bytes_written(daemon) - before
        token_bytes = daemon.wait_json_of("PROPS", "props")["kv"]["bytes_per_token"]
        assert len(stored(daemon)["files"]) == 50
        assert 50 * turn * token_bytes <= written <= 1.5 * 50 * turn * token_bytes


def bytes_written(daemon: DaemonProcess) -> int:
    lines = Path(f"/proc/{daemon.process.pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def test_drop_and_names_that_are_unknown(tiny_llama: Path, tmp_path: Path) -> None:
    with start(tiny_llama, tmp_path) as daemon:
        name = save(daemon)
        expected = restored(daemon, IDS)[0]
        assert ask(daemon, f"DROP hash={name}") == SnapDropped(hash=name)
        assert stored(daemon)["files"] == []
        for verb in ("DROP", "LOAD_SNAPSHOT 0"):
            assert error_of(daemon, f"{verb} hash={name}") == ("unknown_snapshot", {"hash": name})
        assert restored(daemon, IDS)[0] == expected  # a missing file takes nothing away


def test_an_empty_slot_cannot_be_saved(tiny_llama: Path, tmp_path: Path) -> None:
    """Field report 19."""
    with start(tiny_llama, tmp_path) as daemon:
        save(daemon)
        expected = restored(daemon, IDS)[0]
        assert error_of(daemon, "SNAPSHOT 5 tier=disk held=1") == ("empty_slot", {"slot": 5})
        assert error_of(daemon, "SNAPSHOT 9 tier=disk") == ("bad_slot", {"slot": 9, "slots": 8})
        assert error_of(daemon, f"LOAD_SNAPSHOT 8 hash={'0' * 32}") == ("bad_slot", {"slot": 8, "slots": 8})
        assert restored(daemon, IDS)[0] == expected


def test_without_a_folder_everything_is_refused_by_name(tiny_llama: Path) -> None:
    with DaemonProcess(tiny_llama) as daemon:
        prefill(daemon, IDS)
        for line in ("SNAPSHOT 0 tier=disk", "STORED", f"DROP hash={'0' * 32}"):
            assert error_of(daemon, line) == ("no_slot_dir", {})
        daemon.send("- 2 ids=5,6 id=r snap=1:0 tier=disk")
        assert daemon.wait_done("r").fields["code"] == "no_slot_dir"
        assert daemon.wait_json_of("STATUS", "status")["slots"] == {}


# --------------------------------------------------------------------------------------------------
# Files that do not fit


def test_files_of_another_type_arithmetic_or_model(tiny_llama: Path, tmp_path: Path) -> None:
    other = write_tiny_llama(tmp_path / "other.gguf", seed=2)
    folder = tmp_path / "slots"
    with start(tiny_llama, folder) as daemon:
        name = save(daemon)
    for model, flags, field in (
        (tiny_llama, ("-ctv", "f16"), "v"),
        (other, (), "model"),
    ):
        with start(model, folder, *flags) as daemon:
            code, fields = error_of(daemon, f"LOAD_SNAPSHOT 0 hash={name}")
            assert (code, fields["hash"], fields["field"]) == ("wrong_snapshot", name, field)
            assert len(stored(daemon)["files"]) == 1  # it is somebody's
    with DaemonProcess(tiny_llama, f"--slot-dir={folder}") as daemon:
        assert error_of(daemon, f"LOAD_SNAPSHOT 0 hash={name}") == (
            "wrong_snapshot",
            {"hash": name, "field": "math", "stored": "numpy-exact", "wanted": "numpy-float32"},
        )


def test_a_model_that_differs_where_no_sample_lies_is_another_one(tmp_path: Path) -> None:
    """The identity of HELLO is made of samples; a stored snapshot is compared by the whole file."""
    model = write_tiny_llama(tmp_path / "model.gguf", n_ff=4096, n_ctx=512)
    folder = tmp_path / "slots"
    with start(model, folder) as daemon:
        identity = daemon.wait_json_of("PROPS", "props")["model"]["identity"]
        name = save(daemon)
    changed = bytearray(model.read_bytes())
    for at in range(len(changed) - 50_000, 0, -10_000):
        changed[at] ^= 1
        model.write_bytes(changed)
        with open_model(model) as file:
            if file.identity == identity:
                break
        changed[at] ^= 1
    else:
        raise AssertionError("every byte is in a sample")
    with start(model, folder) as daemon:
        code, fields = error_of(daemon, f"LOAD_SNAPSHOT 0 hash={name}")
        assert (code, fields["field"]) == ("wrong_snapshot", "content")


@pytest.mark.parametrize("suffix", [".slot", ".pages"])
@pytest.mark.parametrize("place", [3, 40, -1])
def test_a_damaged_file_changes_nothing(tiny_llama: Path, tmp_path: Path, suffix: str, place: int) -> None:
    """Field report 29."""
    with start(tiny_llama, tmp_path) as daemon:
        name = save_with_logits(daemon)
        save(daemon, [9, 9, 9, *IDS], slot=1)
        expected = restored(daemon, [9, 9, 9, *IDS], slot=1)[0]
        path = tmp_path / f"{name}.slot" if suffix == ".slot" else pages_of(tmp_path, name)
        data = bytearray(path.read_bytes())
        data[place] ^= 0x10
        path.write_bytes(data)
        if place == -1:  # what stands behind the heads is looked at when it is loaded
            code, fields = error_of(daemon, f"LOAD_SNAPSHOT 1 hash={name}")
            assert (code, fields["hash"]) == ("bad_snapshot", name)
            assert fields["reason"] == ("logits_checksum" if suffix == ".slot" else "page_checksum")
            assert restored(daemon, [9, 9, 9, *IDS], slot=1)[0] == expected
            memory = daemon.wait_json_of("STATUS", "status")["memory"]
    with start(tiny_llama, tmp_path) as daemon:
        assert error_of(daemon, f"LOAD_SNAPSHOT 0 hash={name}")[0] == "unknown_snapshot"
        assert path.name in {file.name for file in (tmp_path / "bad").iterdir()}
        assert len(stored(daemon)["files"]) == 1
        if place != -1:
            daemon.wait_stderr(path.name)
        else:
            assert memory["pages_used"] < 20  # the pages of the load that failed were given back


def pages_of(folder: Path, name: str) -> Path:
    """The page file of the snapshot that was saved first."""
    assert (folder / f"{name}.slot").exists()
    return min(folder.glob("*.pages"), key=lambda path: path.stat().st_mtime_ns)


# --------------------------------------------------------------------------------------------------
# Folders that cannot take it


def test_a_snapshot_over_the_budget_is_refused_and_the_slot_keeps_what_it_held(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Field report 21, and P16."""
    with start(tiny_llama, tmp_path, "--slot-bytes=100000") as daemon:
        name = save(daemon, IDS[:20])
        expected = restored(daemon, IDS[:20])[0]
        prefill(daemon, IDS)
        code, fields = error_of(daemon, "SNAPSHOT 0 tier=disk")
        assert (code, fields["budget"]) == ("snapshot_too_large", 100000)
        assert restored(daemon, IDS[:20])[0] == expected
        report = stored(daemon)
        assert [file["hash"] for file in report["files"]] == [name]
        assert report["bytes"] <= 100000
        assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".pages", ".slot"]


def test_a_disk_without_room_is_named_and_the_daemon_lives(tiny_llama: Path, tmp_path: Path) -> None:
    with start(tiny_llama, tmp_path, preexec_fn=_little_room) as daemon:
        prefill(daemon, IDS)
        code, fields = error_of(daemon, "SNAPSHOT 0 tier=disk")
        assert (code, fields["reason"]) == ("write_snapshot", "File too large")
        assert not [path for path in tmp_path.iterdir() if path.name != "lock"]
        assert ask(daemon, "LIST_SLOTS").slots == ()  # type: ignore[attr-defined]
        # An inline snapshot that cannot be saved is taken all the same, and says where it is.
        prefill(daemon, IDS[:150], "snap=150:1 tier=disk")
        assert daemon.next_line() == "[snap] inline slot=1 cur_pos=150 tier=device"
        assert restored(daemon, IDS[:150], slot=1)[1].fields["reused"] == 150
        save(daemon, IDS[:10], slot=2)


def _little_room() -> None:
    """The kernel's answer to a longer file is an error of the write, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))


def test_a_second_daemon_only_reads(tiny_llama: Path, tmp_path: Path) -> None:
    with start(tiny_llama, tmp_path) as first, start(tiny_llama, tmp_path) as second:
        second.wait_stderr("is only read: another daemon writes it")
        reason = f"another daemon writes it (pid {first.process.pid})"
        assert stored(second)["read_only"] == reason
        name = save(first)
        expected = restored(first, IDS)[0]
        assert isinstance(ask(second, f"LOAD_SNAPSHOT 0 hash={name}"), SnapLoaded)
        assert restored(second, IDS)[0] == expected
        assert error_of(second, "SNAPSHOT 0 tier=disk held=1") == ("read_only_slot_dir", {"reason": reason})
        assert error_of(second, f"DROP hash={name}") == ("read_only_slot_dir", {"reason": reason})


def test_a_folder_that_cannot_be_made_ends_the_start(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    process = start(tiny_llama, tmp_path / "file" / "folder")
    assert process.wait_exit() == 2
    process.close()
    assert "--slot-dir" in process.stderr


# --------------------------------------------------------------------------------------------------
# Its end in the middle of it


def test_kill_in_the_middle_of_a_save_leaves_only_whole_snapshots(tiny_llama: Path, tmp_path: Path) -> None:
    rng = random.Random(1)
    names: set[str] = set()
    for attempt in range(6):
        ids = [attempt + 3, *IDS]
        with start(tiny_llama, tmp_path) as daemon:
            prefill(daemon, ids)
            daemon.send("SNAPSHOT 0 tier=disk")
            time.sleep(rng.uniform(0, 0.02))
            daemon.process.send_signal(signal.SIGKILL)
            daemon.wait_exit()
        with start(tiny_llama, tmp_path) as daemon:
            for file in stored(daemon)["files"]:
                names.add(file["hash"])
                assert isinstance(ask(daemon, f"LOAD_SNAPSHOT 0 hash={file['hash']}"), SnapLoaded)
            assert not (tmp_path / "bad").exists()
            assert not list(tmp_path.glob("*.tmp"))


def test_a_save_is_finished_when_the_input_ends_and_left_when_it_is_told_to_quit(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with start(tiny_llama, tmp_path) as daemon:
        prefill(daemon, IDS)
        daemon.send("SNAPSHOT 0 tier=disk")
        daemon.end_input()
        assert daemon.wait_exit() == 0
        assert isinstance(parse_event(daemon.next_line()), SnapTaken)
    with start(tiny_llama, tmp_path) as daemon:
        prefill(daemon, [8, *IDS])
        began = time.monotonic()
        daemon.send("SNAPSHOT 0 tier=disk id=s", "quit")
        assert daemon.wait_done("s").status in ("ok", "err", "cancelled")
        assert daemon.wait_exit() == 0
        assert time.monotonic() - began < 10
        assert not list(tmp_path.glob("*.tmp"))


def test_settings_that_do_not_fit(tiny_llama: Path, tmp_path: Path) -> None:
    for flags in (["--slot-bytes=1GiB"], [f"--slot-dir={tmp_path}", "--slot-bytes=none"]):
        process = DaemonProcess(tiny_llama, *flags)
        assert process.wait_exit() == 2
        process.close()
        assert "--slot-bytes" in process.stderr
    environment = {"SLOTD_SLOT_DIR": str(tmp_path / "by-variable"), "SLOTD_SLOT_BYTES": "1GiB"}
    with DaemonProcess(tiny_llama, env=environment) as daemon:
        assert stored(daemon)["budget"] == 1 << 30
    assert os.path.exists(tmp_path / "by-variable" / "lock")


def test_a_slot_in_host_memory_is_saved_from_there(tiny_llama: Path, tmp_path: Path) -> None:
    with start(tiny_llama, tmp_path / "device") as daemon:
        expected = save(daemon, slot=3)
        fresh, _ = restored(daemon, IDS, 3)
    with start(tiny_llama, tmp_path / "host", "--host-cache=1MiB") as daemon:
        prefill(daemon, IDS)
        assert ask(daemon, "SNAPSHOT 3 tier=host") == SnapTaken(slot=3, cur_pos=len(IDS), tier="host")
        saved = ask(daemon, "SNAPSHOT 3 held=1 tier=disk")
        assert saved == SnapTaken(slot=3, cur_pos=len(IDS), tier="disk", hash=expected)
        assert ask(daemon, f"LOAD_SNAPSHOT 4 hash={expected}") == SnapLoaded(
            slot=4, cur_pos=len(IDS), hash=expected
        )
        assert [restored(daemon, IDS, slot)[0] for slot in (4, 3)] == [fresh, fresh]
