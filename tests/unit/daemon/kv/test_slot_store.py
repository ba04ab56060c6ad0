"""The store of snapshots on disk: round trips, what is written, what is refused, and what survives."""

from __future__ import annotations

import dataclasses
import logging
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotd.daemon.kv.save_plan import Image
from slotd.daemon.kv.slot_store import SlotStore
from slotd.protocol.slot_identity import hash_of_id_bytes, slot_hash
from tests.fakes.slot_images import (
    IDENTITY,
    IDS,
    LOGITS,
    PAGE,
    Sink,
    files,
    hashes,
    id_bytes,
    image,
    kv_bytes,
    load,
    refused,
    store_of,
)


def on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.suffix in (".slot", ".pages"))


# --------------------------------------------------------------------------------------------------
# Round trips


@pytest.mark.parametrize("n", [0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
@pytest.mark.parametrize("logits", [b"", LOGITS])
def test_what_is_saved_is_loaded_after_a_restart(tmp_path: Path, n: int, logits: bytes) -> None:
    store = store_of(tmp_path)
    name = store.save(image(range(n), logits))
    assert name == slot_hash(IDENTITY.model, "f32", "f16", 0, range(n))
    logits = logits if n >= PAGE else b""  # too few tokens for them
    assert load(store, name) == (kv_bytes(id_bytes(range(n))), logits)
    store.close()
    again = store_of(tmp_path)
    assert again.find(name, IDENTITY).ids == id_bytes(range(n))
    assert load(again, name) == (kv_bytes(id_bytes(range(n))), logits)


def test_the_report(tmp_path: Path) -> None:
    store = store_of(tmp_path, 10_000, clock=lambda: 5_000_000_000)
    name = store.save(image(IDS, LOGITS))
    report = store.report()
    (file,) = report["files"]
    manifest = files(tmp_path, ".slot")[0].stat().st_size
    assert file == {
        "hash": name, "model": IDENTITY.model, "k": "f32", "v": "f16", "window": 0, "length": 10,
        "bytes": manifest + 10 * IDENTITY.token_bytes, "last_used": 5.0,
    }  # fmt: skip
    assert (report["bytes"], report["budget"]) == (on_disk(tmp_path), 10_000)
    assert (report["read_only"], report["moved_aside"]) == ("", 0)


def test_files_are_private(tmp_path: Path) -> None:
    store_of(tmp_path / "new" / "folder").save(image(IDS))
    folder = tmp_path / "new" / "folder"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}


class CountedWrites:
    """os.pwrite that counts bytes."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self.write = os.pwrite

    def __call__(self, descriptor: int, data: Any, offset: int) -> int:
        n = self.write(descriptor, data, offset)
        self.n_bytes += n
        return n


@pytest.mark.parametrize("turn", [3, 20, 64, 90])
@pytest.mark.parametrize("logits_tokens", [0, 5, 30])
def test_fifty_growing_turns_write_little_more_than_the_last_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn: int, logits_tokens: int
) -> None:
    """Field report 28: K/V, ids, tables, manifests and logits; sizes in proportion as on real models."""
    token_bytes, page, turns = 6144, 64, 50
    identity = dataclasses.replace(IDENTITY, page=page, page_bytes=page * token_bytes)
    kv = np.random.default_rng(2).integers(0, 256, (turns * turn, token_bytes), dtype=np.uint8)
    ids = np.arange(turns * turn, dtype="<i4")

    def read_page(index: int, start: int, n: int, buffer: memoryview) -> None:
        at = index * page + start
        buffer[:] = kv[at : at + n].tobytes()

    store = store_of(tmp_path)
    counted = CountedWrites()
    monkeypatch.setattr(os, "pwrite", counted)
    names = []
    for number in range(1, turns + 1):
        logits = bytes([number]) * (logits_tokens * token_bytes)
        names.append(store.save(Image(identity, ids[: number * turn].tobytes(), logits, read_page)))
    final = turns * turn * token_bytes + logits_tokens * token_bytes
    assert final <= counted.n_bytes <= 1.5 * final
    for number in (1, 17, 49, 50):
        loaded = np.zeros_like(kv)

        def write_page(index: int, start: int, n: int, data: memoryview, into: Any = loaded) -> None:
            at = index * page + start
            into[at : at + n] = np.frombuffer(data, np.uint8).reshape(n, token_bytes)

        store.read(names[number - 1], write_page)
        assert (loaded[: number * turn] == kv[: number * turn]).all()
        assert not loaded[number * turn :].any()


def test_logits_are_written_once_for_enough_tokens(tmp_path: Path) -> None:
    """Logits of 8 bytes are worth it for 32 bytes of K/V: four tokens since the last ones."""
    store = store_of(tmp_path)
    has_logits = [bool(load(store, store.save(image(range(n), LOGITS)))[1]) for n in range(1, 13)]
    assert has_logits == [n in (4, 8, 12) for n in range(1, 13)]
    assert not load(store, store.save(image(range(7), LOGITS)))[1]  # asked again, the answer is the same
    other = store.save(image([*range(4), 90, 91, 92, 93], LOGITS))
    assert load(store, other)[1] == LOGITS


def test_what_one_turn_adds_to_a_page_is_a_piece_of_its_own(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    names = [store.save(image(range(n))) for n in (2, 3, 10, 11)]
    sizes = [path.stat().st_size for path in files(tmp_path, ".pages")]
    assert len(sizes) == 4
    data = sum(len(path.read_bytes()) for path in files(tmp_path, ".pages"))
    store.drop(names[1])
    assert data == sum(len(path.read_bytes()) for path in files(tmp_path, ".pages"))  # longer ones need it
    for name, n in zip((names[0], *names[2:]), (2, 10, 11), strict=True):
        assert load(store, name)[0] == kv_bytes(id_bytes(range(n)))
    assert store.save(image([0, 1, 2, 77])) not in names  # parts of it in the middle of a page
    assert len(files(tmp_path, ".pages")) == 5


def test_saving_the_same_twice_writes_nothing(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    store.save(image(IDS, LOGITS))
    before = {file.name: file.stat().st_ino for file in tmp_path.iterdir()}
    store.save(image(IDS, LOGITS))
    store.save(image(IDS))  # the one with logits is the better one
    assert {file.name: file.stat().st_ino for file in tmp_path.iterdir()} == before


def test_logits_that_were_missing_are_added(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    store.save(image(IDS))
    name = store.save(image(IDS, LOGITS))
    assert load(store, name)[1] == LOGITS
    assert len(files(tmp_path, ".pages")) == 1


def test_pages_with_other_bytes_are_not_taken_for_the_same(tmp_path: Path) -> None:
    """The same ids computed in another way may round differently: what is loaded is what was saved."""
    store = store_of(tmp_path)
    short = store.save(image(range(PAGE)))
    long = store.save(image(range(2 * PAGE), salt="rounded differently"))
    assert load(store, short)[0] == kv_bytes(id_bytes(range(PAGE)))
    assert load(store, long)[0] == kv_bytes(id_bytes(range(2 * PAGE)), "rounded differently")


def test_a_second_save_of_the_same_ids_replaces_the_first(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    store.save(image(IDS))
    name = store.save(image(IDS, salt="rounded differently"))
    assert load(store, name)[0] == kv_bytes(id_bytes(IDS), "rounded differently")
    assert len(files(tmp_path, ".pages")) == 1  # nobody needs the first one's pages


# --------------------------------------------------------------------------------------------------
# Removing


def test_drop_keeps_pages_that_others_need(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    short, long = store.save(image(range(PAGE))), store.save(image(range(3 * PAGE)))
    store.drop(short)
    assert hashes(store) == [long]
    assert load(store, long)[0] == kv_bytes(id_bytes(range(3 * PAGE)))
    store.drop(long)
    assert files(tmp_path, ".pages") == files(tmp_path, ".slot") == []
    assert refused(lambda: store.drop(long)) == ("unknown_snapshot", {"hash": long})
    assert refused(lambda: store.find(long, IDENTITY)) == ("unknown_snapshot", {"hash": long})
    assert refused(lambda: store.read(long, Sink())) == ("unknown_snapshot", {"hash": long})


def test_the_budget_is_never_exceeded_and_the_oldest_use_goes_first(tmp_path: Path) -> None:
    one = SlotStore(tmp_path / "one", None)
    one.save(image(range(PAGE), LOGITS))
    budget = 3 * one.report()["bytes"] + 10
    store = store_of(tmp_path / "many", budget)
    a, b, c = (store.save(image(range(k, k + PAGE), LOGITS)) for k in (0, 10, 20))
    load(store, a)
    d = store.save(image(range(30, 30 + PAGE), LOGITS))
    assert hashes(store) == [c, a, d]
    assert on_disk(tmp_path / "many") == store.report()["bytes"] <= budget
    assert refused(lambda: store.find(b, IDENTITY))[0] == "unknown_snapshot"


def test_a_snapshot_larger_than_the_budget_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    """Field report 21."""
    store = store_of(tmp_path, 1500)
    kept = store.save(image(IDS, LOGITS))
    before = sorted(file.name for file in tmp_path.iterdir())
    code, fields = refused(lambda: store.save(image(range(50 * PAGE))))
    assert (code, fields["budget"]) == ("snapshot_too_large", 1500)
    assert fields["bytes"] > 1500
    assert sorted(file.name for file in tmp_path.iterdir()) == before
    assert load(store, kept)[0] == kv_bytes(id_bytes(IDS))


def test_a_big_file_is_not_kept_for_the_one_page_that_fits(tmp_path: Path) -> None:
    free = store_of(tmp_path / "free")
    free.save(image(range(40 * PAGE)))
    store = store_of(tmp_path / "full", free.report()["bytes"] + 100)
    store.save(image(range(40 * PAGE)))
    name = store.save(image([*range(PAGE), *range(900, 900 + 2 * PAGE)]))
    assert hashes(store) == [name]
    assert load(store, name)[0] == kv_bytes(id_bytes([*range(PAGE), *range(900, 900 + 2 * PAGE)]))


def test_a_smaller_budget_at_the_next_start_removes_the_oldest(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    store.save(image(range(40 * PAGE)))
    young = store.save(image(range(500, 510)))
    store.close()
    assert hashes(store_of(tmp_path, 2000)) == [young]


def test_the_order_of_uses_survives_a_clock_that_goes_back(tmp_path: Path) -> None:
    now = [1_700_000_000 * 10**9]
    store = store_of(tmp_path, clock=lambda: now[0])
    a, b = store.save(image(range(PAGE))), store.save(image(range(50, 50 + PAGE)))
    now[0] = 10**9
    load(store, a)
    assert hashes(store) == [b, a]
    store.close()
    again = store_of(tmp_path, clock=lambda: 0)
    assert hashes(again) == [b, a]
    c = again.save(image(range(70, 75)))
    assert hashes(again) == [b, a, c]


# --------------------------------------------------------------------------------------------------
# Another model, another type


@pytest.mark.parametrize(
    ("field", "value"),
    [("content", "ee" * 16), ("math", "exact"), ("page_bytes", 2 * IDENTITY.page_bytes)],
)
def test_a_snapshot_of_something_else_is_refused_by_name(tmp_path: Path, field: str, value: Any) -> None:
    store = store_of(tmp_path)
    name = store.save(image(IDS))
    other = dataclasses.replace(IDENTITY, **{field: value})
    expected = {"hash": name, "field": field, "stored": getattr(IDENTITY, field), "wanted": value}
    assert refused(lambda: store.find(name, other)) == ("wrong_snapshot", expected)
    assert hashes(store) == [name]


def test_models_share_no_pages(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    store.save(image(IDS))
    store.save(image(IDS, identity=dataclasses.replace(IDENTITY, model="77" * 16)))
    assert len(files(tmp_path, ".pages")) == 2


# --------------------------------------------------------------------------------------------------
# Damage


def damaged_store(path: Path) -> tuple[str, str, str]:
    """Two snapshots that share pages and one that does not; their hashes."""
    store = store_of(path)
    names = (
        store.save(image(IDS, LOGITS)),
        store.save(image([*IDS, *range(50)], LOGITS)),
        store.save(image(range(7))),
    )
    store.close()
    return names


def test_files_that_are_none_are_moved_aside_at_the_start(tmp_path: Path, caplog: Any) -> None:
    """Field report 30."""
    _, _, other = damaged_store(tmp_path)
    foreign = hash_of_id_bytes("", "", "", 0, b"")
    (tmp_path / f"{foreign}.slot").write_bytes(b"")
    (tmp_path / "short.slot").write_bytes(b'{"version":"x"}')
    (tmp_path / f"{'0' * 32}.pages").mkdir()
    (tmp_path / f"{'1' * 32}.slot").mkdir()
    os.mkfifo(tmp_path / f"{'2' * 32}.slot")
    (tmp_path / f"{'3' * 32}.slot").symlink_to(tmp_path / f"{other}.slot")
    (tmp_path / f"{'4' * 32}.slot").write_bytes((tmp_path / f"{other}.slot").read_bytes())
    (tmp_path / "notes.txt").write_text("mine")
    with caplog.at_level(logging.WARNING):
        store = store_of(tmp_path)
    assert len(hashes(store)) == 3
    assert store.report()["moved_aside"] == 7
    assert len(list((tmp_path / "bad").iterdir())) == 7
    assert (tmp_path / "notes.txt").exists()
    assert caplog.text.count("not a usable snapshot file") == 7


def test_missing_pages_take_their_snapshots_along(tmp_path: Path) -> None:
    first, second, other = damaged_store(tmp_path)
    store = store_of(tmp_path)
    shared = next(part.name for part in store.find(first, IDENTITY).parts)
    store.close()
    (tmp_path / f"{shared}.pages").unlink()
    again = store_of(tmp_path)
    assert hashes(again) == [other]
    assert {file.name for file in (tmp_path / "bad").iterdir()} == {f"{first}.slot", f"{second}.slot"}


def test_a_damaged_page_is_found_when_it_is_loaded(tmp_path: Path) -> None:
    first, second, other = damaged_store(tmp_path)
    store = store_of(tmp_path)
    (part,) = store.find(first, IDENTITY).parts
    path = tmp_path / f"{part.name}.pages"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    sink = Sink()
    assert refused(lambda: store.read(second, sink)) == (
        "bad_snapshot", {"hash": second, "reason": "page_checksum"},
    )  # fmt: skip
    assert hashes(store) == [other]
    assert sorted(file.suffix for file in (tmp_path / "bad").iterdir()) == [".pages", ".slot", ".slot"]
    assert store.save(image(IDS, LOGITS)) == first
    assert load(store, first) == (kv_bytes(id_bytes(IDS)), LOGITS)


def test_the_same_name_may_be_moved_aside_twice(tmp_path: Path) -> None:
    for _ in range(2):
        name = damaged_store(tmp_path)[2]
        (tmp_path / f"{name}.slot").write_bytes(b"")
        store_of(tmp_path).close()
    assert {file.name for file in (tmp_path / "bad").iterdir()} == {f"{name}.slot", f"{name}.slot.1"}
