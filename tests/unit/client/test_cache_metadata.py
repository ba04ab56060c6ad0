"""Files of the caches: schema, checksums, whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from slotd.client import cache_metadata
from slotd.client.cache_entries import Identity, as_bytes
from slotd.client.cache_metadata import BadMetadata, MetadataFolder, Record, parse_meta

ME = Identity("model", "f16", "q8_0", 5, 4096, "salt")
IDS = as_bytes(range(1, 41))
KEY = ME.key(IDS)
RECORD = Record("prefix", KEY, IDS, 40, ME.content(IDS), 3, 17)


@pytest.fixture
def folder(tmp_path: Path) -> MetadataFolder:
    made = MetadataFolder(tmp_path / "deep" / "cache", ME)
    made.write(RECORD)
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "cache"


def change(path: Path, **values: Any) -> None:
    meta = path / f"{KEY}.meta.json"
    data = json.loads(meta.read_text())
    data.update(values)
    meta.write_text(json.dumps({name: value for name, value in data.items() if value is not Ellipsis}))


def test_what_is_written_is_read(folder: MetadataFolder, path: Path) -> None:
    assert folder.load() == [RECORD]
    assert sorted(os.listdir(path)) == [f"{KEY}.bin", f"{KEY}.meta.json"]
    assert {(path / name).stat().st_mode & 0o777 for name in os.listdir(path)} == {
        0o600
    }  # prompts are private
    assert path.stat().st_mode & 0o077 == 0


def test_version_2_has_these_fields(folder: MetadataFolder, path: Path) -> None:
    data = json.loads((path / f"{KEY}.meta.json").read_text())
    assert data["version"] == 2
    assert {"key_hex", "kv_k_type", "fa_window", "cur_ids_len", "raw_prompt_len", "last_used_ns"} <= set(data)


BAD: list[tuple[str, Any]] = [
    *[(name, value) for name in ("cur_ids_len", "raw_prompt_len", "hits", "last_used_ns")
      for value in (True, -1, 1.0, "1", None, [], 1 << 63, ...)],
    ("cur_ids_len", 39), ("cur_ids_len", 41), ("cur_ids_len", 0), ("cur_ids_len", 1 << 31),
    *[("version", value) for value in (1, 3, 2.0, "2", True, None, ...)],
    *[("kind", value) for value in ("other", 1, None, [], ...)],
    *[(name, value) for name in ("key_hex", "ids_hash", "content")
      for value in ("", "a" * 31, "g" * 32, "A" * 32, 1, None, ...) if (name, value) != ("content", "")],
    ("key_hex", "a" * 32), ("ids_hash", "a" * 32),
    *[(name, value) for name in ("model", "kv_k_type", "kv_v_type", "salt") for value in ("x", 1, None, ...)],
    *[(name, value) for name in ("fa_window", "max_ctx") for value in (6, "5", True, None, ...)],
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD)
def test_every_field_is_checked(folder: MetadataFolder, path: Path, name: str, value: Any) -> None:
    change(path, **{name: value})
    assert folder.load() == []


def test_unknown_fields_do_no_harm(folder: MetadataFolder, path: Path) -> None:
    change(path, later=1)
    assert folder.load() == [RECORD]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "1", '"x"', "{", "[" * 100_000, '{"version":"x"}', "{}", "\x00" * 10, " " * 70_000],
)
def test_a_malformed_file_is_passed_over(folder: MetadataFolder, path: Path, text: str) -> None:
    (path / f"{'a' * 32}.meta.json").write_text(text)
    assert folder.load() == [RECORD]


def test_what_is_no_file_is_passed_over(folder: MetadataFolder, path: Path) -> None:
    (path / f"{'a' * 32}.meta.json").mkdir()
    (path / f"{'b' * 32}.meta.json").symlink_to("nowhere")
    (path / "other.txt").write_text("x")
    assert folder.load() == [RECORD]


def test_ids_that_are_gone_cut_or_changed(folder: MetadataFolder, path: Path) -> None:
    ids = path / f"{KEY}.bin"
    good = ids.read_bytes()
    for bad in (good[:-1], good + b"\0", bytes([good[0] ^ 1]) + good[1:], b""):
        ids.write_bytes(bad)
        assert folder.load() == []
    ids.unlink()
    assert folder.load() == []
    ids.mkdir()
    assert folder.load() == []


@pytest.mark.parametrize(
    "other",
    [Identity("x", "f16", "q8_0", 5, 4096, "salt"), Identity("model", "f16", "q8_0", 5, 4096, "other"),
     Identity("model", "f32", "q8_0", 5, 4096, "salt"), Identity("model", "f16", "q8_0", 5, 8192, "salt")],
)  # fmt: skip
def test_a_foreign_models_file_is_passed_over_and_stays(
    folder: MetadataFolder, path: Path, other: Identity
) -> None:
    assert MetadataFolder(path, other).load() == []
    assert folder.load() == [RECORD]


def test_the_newest_are_kept_in_order_of_use(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_metadata, "MOST_RECORDS", 3)
    folder = MetadataFolder(path, ME)
    for used in (5, 1, 4, 2, 3):
        ids = as_bytes([used] * 20)
        folder.write(Record("prefix", ME.key(ids), ids, 20, ME.content(ids), 0, used))
    assert [record.last_used_ns for record in folder.load()] == [3, 4, 5]
    assert len(os.listdir(path)) == 6


def test_a_full_record_keeps_the_length_of_its_prompt(path: Path) -> None:
    folder = MetadataFolder(path, ME)
    record = Record("full", ME.key(as_bytes(range(500))), IDS, 500, "", 0, 1)
    folder.write(record)
    assert folder.load() == [record]


def test_removing_twice_is_removing(folder: MetadataFolder, path: Path) -> None:
    folder.remove(KEY)
    folder.remove(KEY)
    assert os.listdir(path) == []


def test_a_failed_write_leaves_the_old_one(
    folder: MetadataFolder, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: str, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        folder.write(RECORD)
    assert folder.load() == [RECORD]
    assert len(os.listdir(path)) == 2


def test_a_folder_that_cannot_be_listed_is_empty(folder: MetadataFolder, path: Path) -> None:
    folder.remove(KEY)
    path.rmdir()
    assert folder.load() == []


def test_the_error_names_the_field() -> None:
    with pytest.raises(BadMetadata, match="version is 'x', not 2"):
        parse_meta(b'{"version":"x"}', ME)
