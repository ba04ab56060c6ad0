"""Files of stored snapshots: whatever happens to their bytes, nothing wrong is ever loaded."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotd.daemon.kv.page_files import PageEntry, PageTable, decode_page_table, encode_page_table
from slotd.daemon.kv.slot_files import (
    FORMAT_VERSION,
    MANIFEST_MAGIC,
    BadFile,
    Blob,
    Part,
    decode_manifest,
    encode_manifest,
    read_section,
)
from slotd.daemon.kv.slot_store import SlotStore
from slotd.protocol.errors import RequestError
from tests.fakes.slot_images import IDENTITY, PAGE, Sink, id_bytes, image, kv_bytes

LONG = range(200, 213)
SHORT = range(200, 205)
LOGITS = bytes(range(8))
STATE = bytes(range(40, 80))


def reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, n: data[offset : offset + n]


def ids_of(part: Part) -> bytes:
    if part != PART:
        raise BadFile("pages_missing")
    return id_bytes(LONG)


def whole_manifest(data: bytes) -> tuple[Any, bytes, bytes]:
    manifest = decode_manifest(reader(data), len(data), ids_of)
    logits, state = (
        read_section(reader(data), section, "section") for section in (manifest.logits, manifest.state)
    )
    return manifest, logits, state


# --------------------------------------------------------------------------------------------------
# One file

PART = Part("5" * 32, 0, 4)
MANIFEST = encode_manifest(IDENTITY, 13, (PART,), LOGITS)
WITH_STATE = encode_manifest(IDENTITY, 13, (PART,), LOGITS, Blob.of(STATE)) + STATE
manifests = st.sampled_from([MANIFEST, WITH_STATE])
TABLE = PageTable(
    IDENTITY.token_bytes,
    tuple(PageEntry(bytes([k] * 16), bytes([k + 1] * 16), 0, min(PAGE, 13 - PAGE * k), k) for k in range(4)),
    id_bytes(LONG),
)
PAGES = encode_page_table(TABLE) + bytes(13 * IDENTITY.token_bytes)


@pytest.mark.parametrize(("data", "kept"), [(MANIFEST, b""), (WITH_STATE, STATE)])
def test_a_manifest_is_read_as_it_was_written(data: bytes, kept: bytes) -> None:
    manifest, logits, state = whole_manifest(data)
    assert (manifest.identity, manifest.ids, manifest.parts) == (IDENTITY, id_bytes(LONG), (PART,))
    assert (manifest.length, logits, state, manifest.file_bytes) == (13, LOGITS, kept, len(data))


def test_only_a_state_needs_the_newer_version() -> None:
    """Files of models without recurrent layers are those that older versions read and wrote."""
    assert [data[8] for data in (MANIFEST, WITH_STATE, PAGES)] == [2, 3, 2]


@pytest.mark.parametrize(("data", "version"), [(MANIFEST, 3), (WITH_STATE, 2), (MANIFEST, 1), (MANIFEST, 4)])
def test_a_manifest_of_another_version_is_refused(data: bytes, version: int) -> None:
    """Even with a right checksum."""
    n = 16 + int.from_bytes(data[12:16], "little")
    framed = data[:8] + struct.pack("<I", version) + data[12:n]
    with pytest.raises(BadFile):
        whole_manifest(framed + struct.pack("<I", zlib.crc32(framed)) + data[n + 4 :])


def test_a_page_table_is_read_as_it_was_written() -> None:
    assert decode_page_table(reader(PAGES), len(PAGES)) == TABLE
    assert TABLE.data_start == len(PAGES) - 13 * IDENTITY.token_bytes
    assert TABLE.offsets == [0, 4, 8, 12, 13]


@settings(max_examples=200)
@given(manifest=manifests, at=st.integers(0, 8 * len(WITH_STATE) - 1))
def test_every_bit_of_a_manifest_counts(manifest: bytes, at: int) -> None:
    data = bytearray(manifest)
    data[at // 8 % len(data)] ^= 1 << at % 8
    with pytest.raises(BadFile):
        whole_manifest(bytes(data))


@settings(max_examples=200)
@given(at=st.integers(0, 8 * TABLE.data_start - 1))
def test_every_bit_of_a_page_table_counts(at: int) -> None:
    data = bytearray(PAGES)
    data[at // 8] ^= 1 << at % 8
    with pytest.raises(BadFile):
        decode_page_table(reader(bytes(data)), len(data))


@given(manifest=manifests, n=st.integers(0, len(MANIFEST) - 1), more=st.binary(min_size=1, max_size=9))
def test_a_manifest_of_another_length_is_refused(manifest: bytes, n: int, more: bytes) -> None:
    for data in (manifest[:n], manifest[:-1], manifest + more):
        with pytest.raises(BadFile):
            whole_manifest(data)


@given(n=st.integers(0, len(PAGES) - 1), more=st.binary(min_size=1, max_size=9))
def test_a_page_file_of_another_length_is_refused(n: int, more: bytes) -> None:
    for data in (PAGES[:n], PAGES + more):
        with pytest.raises(BadFile):
            decode_page_table(reader(data), len(data))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(["identity", "length", "sections", "token_bytes", "pieces", "tokens", "table_crc"])


@settings(max_examples=200)
@given(header=json_values | st.dictionaries(names, json_values), rest=st.binary(max_size=40))
def test_a_header_of_any_other_json_is_refused(header: Any, rest: bytes) -> None:
    """Even with a right checksum."""
    text = json.dumps(header).encode()
    framed = struct.pack("<8sII", MANIFEST_MAGIC, FORMAT_VERSION, len(text)) + text
    data = framed + struct.pack("<I", zlib.crc32(framed)) + rest
    with pytest.raises(BadFile):
        decode_manifest(reader(data), len(data), ids_of)


# --------------------------------------------------------------------------------------------------
# A whole folder


@contextmanager
def damaged_folder(change: Callable[[bytearray], object], which: int) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp())
    try:
        store = SlotStore(path, None)
        store.save(image(SHORT, LOGITS))
        store.save(image(LONG, LOGITS, state=STATE))
        store.close()
        files = sorted(file for file in path.iterdir() if file.suffix in (".slot", ".pages"))
        assert len(files) == 4
        data = bytearray(files[which].read_bytes())
        change(data)
        files[which].write_bytes(data)
        yield path
    finally:
        shutil.rmtree(path)


def check_what_is_left(path: Path) -> int:
    """Load everything; returns how many snapshots are whole. What is given out is right or refused."""
    store = SlotStore(path, None)
    whole = 0
    for name in [file["hash"] for file in store.report()["files"]]:
        sink = Sink()
        try:
            ids = store.find(name, IDENTITY).ids
            logits, state = store.read(name, sink)
        except RequestError as error:
            assert error.code in ("bad_snapshot", "unknown_snapshot")  # noqa: PT017
            continue
        assert ids in (id_bytes(SHORT), id_bytes(LONG))
        assert (sink.data, logits) == (kv_bytes(ids), LOGITS)
        assert state == (STATE if ids == id_bytes(LONG) else b"")
        whole += 1
    assert whole == len(store.report()["files"])  # what was refused is listed no more
    store.close()
    return whole


@settings(max_examples=60, deadline=None)
@given(which=st.integers(0, 3), at=st.integers(0, 10**6))
def test_a_flipped_bit_anywhere_is_refused(which: int, at: int) -> None:
    """Field report 29."""

    def flip(data: bytearray) -> None:
        data[at // 8 % len(data)] ^= 1 << at % 8

    with damaged_folder(flip, which) as path:
        assert check_what_is_left(path) < 2
        assert (path / "bad").is_dir()


@settings(max_examples=60, deadline=None)
@given(which=st.integers(0, 3), share=st.floats(0, 0.999))
def test_a_file_that_is_cut_anywhere_is_refused(which: int, share: float) -> None:
    def cut(data: bytearray) -> None:
        del data[int(share * len(data)) :]

    with damaged_folder(cut, which) as path:
        assert check_what_is_left(path) < 2


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(0, 5 * PAGE), min_size=1, max_size=6), drops=st.integers(0, 63))
def test_any_history_of_saves_and_drops_keeps_the_rest_whole(lengths: list[int], drops: int) -> None:
    path = Path(tempfile.mkdtemp())
    try:
        store = SlotStore(path, None)
        saved = {store.save(image(range(n))): n for n in lengths}
        for bit, name in enumerate(list(saved)):
            if drops >> bit & 1:
                store.drop(name)
                del saved[name]
        store.close()
        again = SlotStore(path, None)
        assert {file["hash"] for file in again.report()["files"]} == set(saved)
        for name, n in saved.items():
            sink = Sink()
            again.find(name, IDENTITY)
            again.read(name, sink)
            assert sink.data == kv_bytes(id_bytes(range(n)))
        again.close()
    finally:
        shutil.rmtree(path)
