"""The part file: records that survive, torn lines, locks, publication."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slotd.client.journal import Journal, line_hash
from slotd.protocol.errors import ConfigError


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def part(out: Path) -> Path:
    return out.with_name("out.jsonl.part")


def write(out: Path, lines: list[int]) -> None:
    journal = Journal(out, "s", resume=False)
    for line in lines:
        journal.record(line, f"h{line}", {"id": line})
    journal.close()


def test_published_in_input_order_and_the_part_file_is_gone(out: Path) -> None:
    journal = Journal(out, "s", resume=False)
    for line in (3, 1, 2):
        journal.record(line, "h", {"id": line, "text": "ü"})
    assert not out.exists()
    journal.publish(iter([1, 2, 3]))
    journal.close()
    assert [json.loads(line)["id"] for line in out.read_bytes().splitlines()] == [1, 2, 3]
    assert [path.name for path in out.parent.iterdir()] == ["out.jsonl"]


def test_each_record_is_on_file_at_once(out: Path) -> None:
    journal = Journal(out, "s", resume=False)
    journal.record(1, "h", {"id": "a"})
    entry = json.loads(part(out).read_bytes())
    assert entry == {"line": 1, "hash": "h", "settings": "s", "record": {"id": "a"}}
    journal.close()


def test_resume_takes_whole_records_and_cuts_a_torn_line(out: Path) -> None:
    write(out, [1, 2])
    whole = part(out).read_bytes()
    for cut in range(1, len(whole)):
        part(out).write_bytes(whole[:cut])
        journal = Journal(out, "s", resume=True)
        n_whole = whole[:cut].count(b"\n")
        assert [journal.has(1, "h1"), journal.has(2, "h2")] == [n_whole >= 1, n_whole >= 2]
        assert part(out).stat().st_size == len(b"".join(whole[:cut].splitlines(keepends=True)[:n_whole]))
        journal.record(9, "h9", {"id": 9})
        assert part(out).read_bytes().splitlines()[-1].startswith(b'{"line": 9')
        journal.close()


def test_a_record_counts_only_for_the_very_line(out: Path) -> None:
    write(out, [1])
    journal = Journal(out, "s", resume=True)
    assert journal.has(1, "h1")
    assert not journal.has(1, "other")
    assert not journal.has(2, "h1")
    journal.close()


def test_records_of_other_settings_are_stale(out: Path) -> None:
    write(out, [1, 2])
    journal = Journal(out, "other", resume=True)
    assert not journal.has(1, "h1")
    assert journal.stale == 2
    journal.close()


@pytest.mark.parametrize(
    "line", [b"junk\n", b"[]\n", b'{"line": "1"}\n', b'{"line":1,"hash":2,"settings":"s","record":{}}\n']
)
def test_a_damaged_line_is_passed_over(out: Path, line: bytes) -> None:
    write(out, [1, 2])
    first, second = part(out).read_bytes().splitlines(keepends=True)
    part(out).write_bytes(first + line + second)
    journal = Journal(out, "s", resume=True)
    assert journal.has(1, "h1")
    assert journal.has(2, "h2")
    journal.publish(iter([2, 1]))
    journal.close()
    assert [json.loads(raw)["id"] for raw in out.read_bytes().splitlines()] == [2, 1]


def test_a_later_record_of_a_line_counts(out: Path) -> None:
    write(out, [1])
    journal = Journal(out, "s", resume=True)
    journal.record(1, "new", {"id": "new"})
    journal.publish(iter([1]))
    journal.close()
    assert json.loads(out.read_bytes()) == {"id": "new"}


def test_records_on_file_are_not_overwritten_without_resume(out: Path) -> None:
    write(out, [1])
    before = part(out).read_bytes()
    with pytest.raises(ConfigError, match="add --resume"):
        Journal(out, "s", resume=False)
    assert part(out).read_bytes() == before


def test_the_second_batch_on_an_output_is_refused(out: Path) -> None:
    first = Journal(out, "s", resume=False)
    with pytest.raises(ConfigError, match="another batch"):
        Journal(out, "s", resume=True)
    first.close()
    Journal(out, "s", resume=True).close()


def test_no_empty_part_file_is_left(out: Path) -> None:
    journal = Journal(out, "s", resume=False)
    assert journal.empty
    assert journal.fresh
    journal.close()
    assert list(out.parent.iterdir()) == []


def test_a_record_after_close_goes_nowhere(out: Path) -> None:
    journal = Journal(out, "s", resume=False)
    journal.close()
    with pytest.raises(OSError, match="descriptor"):
        journal.record(1, "h", {})


def test_failed_tells_error_records(out: Path) -> None:
    journal = Journal(out, "s", resume=False)
    journal.record(1, "h", {"error": {"code": "oom"}})
    journal.record(2, "h", {"error": None})
    assert [journal.failed(1), journal.failed(2)] == [True, False]
    journal.close()


def test_an_output_that_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/null")):
        with pytest.raises(ConfigError, match="not a regular file"):
            Journal(path, "s", resume=False)


def test_the_hash_is_of_the_line_without_its_end() -> None:
    assert line_hash(b"a\n") == line_hash(b"a\r\n") == line_hash(b"a") != line_hash(b"a ")
