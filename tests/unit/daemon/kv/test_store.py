"""Page storage: types, growth, views, cleanliness."""

from __future__ import annotations

import numpy as np
import pytest

from slotd.daemon.kv.element_types import KV_TYPES, kv_type
from slotd.daemon.kv.kv_shape import KvShape
from slotd.daemon.kv.pages import PAGE, SEGMENT_PAGES
from slotd.daemon.kv.store import PageStore
from slotd.daemon.memory import DeviceMemory, OutOfDeviceMemory
from slotd.daemon.ops.kv_blocks import stored_bytes

LAYERS, HEADS, DIM, VALUE_DIM = 2, 3, 8, 4


def store_in(memory: DeviceMemory, k: str = "f32", v: str = "f32") -> PageStore:
    return PageStore(memory, KvShape(LAYERS, HEADS, DIM, VALUE_DIM, kv_type(k), kv_type(v)))


@pytest.fixture
def store() -> PageStore:
    return store_in(DeviceMemory())


def test_a_segment_is_one_allocation_with_two_types() -> None:
    memory = DeviceMemory()
    store = store_in(memory, "f16", "f32")
    assert store.bytes_per_token == LAYERS * HEADS * (DIM * 2 + VALUE_DIM * 4)
    table = store.allocate(2)
    (run,) = store.runs(table)
    assert (run.k.dtype, run.v.dtype) == (np.float16, np.float32)
    assert run.k.shape == (LAYERS, 2, HEADS, PAGE, DIM)
    assert run.v.shape == (LAYERS, 2, HEADS, PAGE, VALUE_DIM)
    assert run.k.base is not None
    assert store.segment_bytes <= memory.live("kv") <= store.segment_bytes * 9 / 8


def test_it_grows_by_segments_and_trims_free_ones() -> None:
    memory = DeviceMemory()
    store = store_in(memory)
    held = store.allocate(SEGMENT_PAGES + 1)
    one = memory.live("kv") // 2
    store.pages.release(held[-1:])
    assert store.trim() == store.segment_bytes
    assert memory.live("kv") == one
    assert store.trim() == 0
    assert len(store.allocate(3)) == 3


def test_a_failed_growth_changes_nothing() -> None:
    memory = DeviceMemory()
    store_in(memory).allocate(1)
    segment = memory.live("kv") or memory.cached
    memory = DeviceMemory(limit=2 * segment)
    store = store_in(memory)
    held = store.allocate(1)
    with pytest.raises(OutOfDeviceMemory):
        store.allocate(2 * SEGMENT_PAGES)
    assert (store.pages.n_free, store.pages.n_used) == (SEGMENT_PAGES - 1, 1)
    assert memory.live("kv") == segment
    assert store.allocate(SEGMENT_PAGES - 1) == [page + held[0] for page in range(1, SEGMENT_PAGES)]


def test_runs_follow_the_page_table(store: PageStore) -> None:
    store.allocate(2 * SEGMENT_PAGES)
    runs = list(store.runs([4, 5, 6, 2, 15, 16, 17]))
    assert [(run.first, run.stop) for run in runs] == [(0, 3), (3, 4), (4, 5), (5, 7)]
    for page in (5, 16):
        k, _ = store.place(page, 7)
        k[...] = page
    assert (runs[0].k[:, 1, :, 7] == 5).all()
    assert (runs[3].k[:, 0, :, 7] == 16).all()


def test_pieces_cut_rows_at_pages(store: PageStore) -> None:
    table = store.allocate(3)
    pieces = list(store.pieces(table, place=60, n=70, row=5))
    assert [(piece.start, piece.stop) for piece in pieces] == [(5, 9), (9, 73), (73, 75)]
    assert [piece.k.shape for piece in pieces] == [(LAYERS, HEADS, n, DIM) for n in (4, 64, 2)]
    pieces[2].v[...] = 3
    assert (store.place(table[2], 1)[1] == 3).all()


def test_prepare_clears_what_the_last_owner_left(store: PageStore) -> None:
    (page,) = store.allocate(1)
    for offset in range(PAGE):
        k, v = store.place(page, offset)
        k[...] = v[...] = np.nan
    store.prepare(page, 3, 10)
    (run,) = store.runs([page])
    for plane in (run.k, run.v):
        assert np.isnan(plane[:, :, :, :3]).all()
        assert (plane[:, :, :, 3:] == 0).all()


def test_prepare_clears_rows_that_were_not_committed(store: PageStore) -> None:
    (page,) = store.allocate(1)
    store.prepare(page, 0, 8)
    for offset in range(8):
        store.place(page, offset)[0][...] = np.nan
    store.prepare(page, 2, 3)  # rows 2..7 were dropped, one new row
    (run,) = store.runs([page])
    assert (run.k[:, :, :, 2:] == 0).all()


def test_copy_takes_the_first_places_only(store: PageStore) -> None:
    source, target = store.allocate(2)
    for offset in range(PAGE):
        for page, value in ((source, offset), (target, -1)):
            k, v = store.place(page, offset)
            k[...] = v[...] = value
    store.copy(source, target, 5)
    for offset, value in ((0, 0), (4, 4), (5, -1)):
        assert all((plane == value).all() for plane in store.place(target, offset))


def test_move_reads_all_before_it_writes(store: PageStore) -> None:
    pages = store.allocate(2)
    places = [(page, offset) for page in pages for offset in (0, 5)]
    for number, place in enumerate(places):
        for plane in store.place(*place):
            plane[...] = number
    store.move([places[1], places[3], places[2]], [places[3], places[2], places[0]])
    for place, value in zip(places, (2, 1, 3, 1), strict=True):
        assert all((plane == value).all() for plane in store.place(*place))


@pytest.mark.parametrize("name", KV_TYPES)
def test_p52_move_keeps_stored_bytes(name: str) -> None:
    """Whatever they mean: NaNs with a payload too."""
    store = PageStore(DeviceMemory(), KvShape(LAYERS, HEADS, 64, 32, kv_type(name), kv_type(name)))
    (page,) = store.allocate(1)
    noise = np.random.default_rng(0).integers(0, 256, store.page_bytes, dtype=np.uint8)
    store.write_page(page, PAGE, noise.data)
    before = [plane.tobytes() for plane in store.place(page, 3)]
    store.move([(page, 3)], [(page, 60)])
    assert [plane.tobytes() for plane in store.place(page, 60)] == before


def test_a_move_that_finds_no_room_changes_nothing(store: PageStore) -> None:
    (page,) = store.allocate(1)
    store.prepare(page, 0, PAGE)
    store._memory.limit = store._memory.live()
    with pytest.raises(OutOfDeviceMemory):
        store.move([(page, 3), (page, 4)], [(page, 1), (page, 2)])


@pytest.mark.parametrize("k", KV_TYPES)
@pytest.mark.parametrize("v", KV_TYPES)
def test_every_pair_of_types_is_kept_as_bytes(k: str, v: str) -> None:
    """Sizes, copies and clearing, whatever the bytes are."""
    store = PageStore(DeviceMemory(), KvShape(LAYERS, HEADS, 64, 32, kv_type(k), kv_type(v)))
    source, target = store.allocate(2)
    (run,) = store.runs([source, target])
    assert store.bytes_per_token * 2 * PAGE == run.k.nbytes + run.v.nbytes
    rng = np.random.default_rng(0)
    for plane in (stored_bytes(run.k), stored_bytes(run.v)):
        plane[...] = rng.integers(0, 256, plane.shape)
    before = [stored_bytes(plane).copy() for plane in (run.k, run.v)]
    store.copy(source, target, 5)
    store.prepare(source, 60, 62)
    for plane, old in zip((run.k, run.v), before, strict=True):
        now = stored_bytes(plane)
        assert (now[:, 1, :, :5] == old[:, 0, :, :5]).all()
        assert (now[:, 1, :, 5:] == old[:, 1, :, 5:]).all()
        assert (now[:, 0, :, :60] == old[:, 0, :, :60]).all()
        assert (now[:, 0, :, 60:] == 0).all()
    buffer = memoryview(bytearray(7 * store.bytes_per_token))
    store.read_page(source, 7, buffer)
    store.write_page(target, 7, buffer)
    for plane in (stored_bytes(run.k), stored_bytes(run.v)):
        assert (plane[:, 1, :, :7] == plane[:, 0, :, :7]).all()


@pytest.mark.parametrize(("k_type", "v_type"), [("f32", "f16"), *((name, "q4_0") for name in KV_TYPES)])
@pytest.mark.parametrize("n", [1, 17, PAGE])
def test_bytes_of_a_page_come_back_as_they_were(k_type: str, v_type: str, n: int) -> None:
    """P52: stored bytes are moved, whatever numbers they are."""
    store = PageStore(DeviceMemory(), KvShape(LAYERS, HEADS, 64, 32, kv_type(k_type), kv_type(v_type)))
    source, other, target = store.allocate(3)
    size = PAGE * store.bytes_per_token
    noise = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8).tobytes()
    store.write_page(source, PAGE, memoryview(noise))
    store.write_page(other, PAGE, memoryview(bytes(size)))
    store.write_page(target, PAGE, memoryview(bytes(size)))
    buffer = memoryview(bytearray(n * store.bytes_per_token))
    store.read_page(source, n, buffer)
    store.write_page(target, n, buffer)
    again = memoryview(bytearray(len(buffer)))
    store.read_page(target, n, again)
    assert bytes(again) == bytes(buffer)
    for offset in range(PAGE):
        there, here = store.place(target, offset), store.place(source, offset)
        for plane, wanted in zip(there, here, strict=True):
            expected = wanted.tobytes() if offset < n else bytes(wanted.nbytes)
            assert plane.tobytes() == expected
    whole = memoryview(bytearray(size))
    store.read_page(other, PAGE, whole)
    assert not any(whole)


def test_a_page_that_was_filled_is_clean_behind_the_next_end(store: PageStore) -> None:
    """Places that were filled are zero again before rows behind a shorter prefix are read."""
    (page,) = store.allocate(1)
    store.prepare(page, 0, 1)
    store.write_page(page, 9, memoryview(b"\xff" * (9 * store.bytes_per_token)))
    store.prepare(page, 4, 5)
    for offset in range(4, 9):
        assert not any(plane.any() for plane in store.place(page, offset))
