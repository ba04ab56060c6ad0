"""The addresses of pages on a GPU, against the NumPy store: bytes moved by them arrive where they belong."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from slotd.daemon.kv.cuda_store import CudaPageStore
from slotd.daemon.kv.element_types import KV_TYPES, kv_type
from slotd.daemon.kv.kv_shape import KvShape
from slotd.daemon.kv.pages import PAGE, SEGMENT_PAGES
from slotd.daemon.memory import DeviceMemory, OutOfDeviceMemory
from tests.fakes.page_mirror import HostCopies, Mirror

PAIRS = [*((name, "f16") for name in KV_TYPES), ("f32", "q4_0"), ("q8_0", "q5_1")]


@pytest.fixture(params=PAIRS, ids="-".join)
def mirror(request: pytest.FixtureRequest) -> Mirror:
    return Mirror(HostCopies, DeviceMemory(), 20, request.param)


def store(memory: DeviceMemory | None = None) -> CudaPageStore:
    f16 = kv_type("f16")
    return CudaPageStore(HostCopies, memory or DeviceMemory(), KvShape(2, 3, 64, 32, f16, f16))


def test_p52_the_noise_is_there(mirror: Mirror) -> None:
    assert mirror.differing() == []


def test_p52_copies(mirror: Mirror) -> None:
    mirror.check_copies()


def test_p52_moves(mirror: Mirror) -> None:
    mirror.check_moves()


def test_p52_pages_outside(mirror: Mirror) -> None:
    mirror.check_pages_outside()


def test_p52_single_pages(mirror: Mirror) -> None:
    mirror.check_single_pages()


def test_a_mirror_sees_a_difference(mirror: Mirror) -> None:
    mirror.host.write_page(mirror.pages[3], 1, mirror.noise(1).data)
    assert mirror.differing() == [mirror.pages[3]]


def test_addresses_are_those_of_the_layout() -> None:
    pages = store()
    table = pages.allocate(SEGMENT_PAGES + 2)
    k, v = pages.addresses(table)
    k_layer, in_layer = pages.layout.in_segment.k_layer, 3 * PAGE * 64 * 2
    assert k_layer == SEGMENT_PAGES * in_layer
    assert (np.diff(k[:SEGMENT_PAGES].astype(np.int64)) == in_layer).all()
    assert int(v[0] - k[0]) == 2 * k_layer  # two layers of K, then V
    assert k[SEGMENT_PAGES] % 64 == 0
    assert len(set(k.tolist()) | set(v.tolist())) == 2 * len(table)


def test_segments_come_and_go() -> None:
    memory = DeviceMemory()
    pages = store(memory)
    table = pages.allocate(3 * SEGMENT_PAGES)
    middle = table[SEGMENT_PAGES : 2 * SEGMENT_PAGES]
    kept = pages._at(table[-1:]).tolist()
    pages.pages.release(middle)
    assert pages.trim() == pages.segment_bytes
    assert memory.live("kv") == 2 * pages.segment_bytes
    assert not pages._at(middle).any()
    assert pages._at(table[-1:]).tolist() == kept
    assert pages.allocate(SEGMENT_PAGES) == middle
    assert pages._at(middle).all()


def test_without_room_nothing_changes() -> None:
    memory = DeviceMemory()
    pages = store(memory)
    memory.limit = pages.segment_bytes * 3 // 2
    with pytest.raises(OutOfDeviceMemory):
        pages.allocate(SEGMENT_PAGES + 1)
    assert (pages.pages.n_free, pages.pages.n_used) == (0, 0)
    assert len(pages.allocate(SEGMENT_PAGES)) == SEGMENT_PAGES


def test_compaction_moves_the_bytes_along() -> None:
    mirror = Mirror(HostCopies, DeviceMemory(), 3 * SEGMENT_PAGES)
    gone = [page for page in mirror.pages if page % 3]
    for both in (mirror.host, mirror.cuda):
        both.pages.release(gone)
    moves = mirror.host.compact()
    assert mirror.cuda.compact() == moves != {}
    kept = [page for page in mirror.pages if page % 3 == 0]
    mirror.pages = [moves.get(page, page) for page in kept]
    assert mirror.differing() == []
    assert mirror.host.trim() == mirror.cuda.trim() == 2 * mirror.cuda.segment_bytes


def test_other_threads_wait_for_what_was_there_when_their_pages_were_given_out() -> None:
    pages = store()
    copies = pages._copies
    assert isinstance(copies, HostCopies)
    steps = [lambda: pages.allocate(1), pages.settle, lambda: pages.read([0], 5), pages.compact]
    counts = []
    for step in steps:
        before = copies.settled
        step()
        counts.append(copies.settled - before)
    assert counts == [1, 1, 1, 0]  # nothing was there to compact


@pytest.mark.parametrize("n", range(1, 6))
def test_pages_outside_are_found_in_their_blocks(n: int) -> None:
    """Blocks hold two pages; the last one may be half full."""
    mirror = Mirror(HostCopies, DeviceMemory(), n)
    stored = mirror.cuda.read(mirror.pages, n * PAGE)
    assert [len(block) for block in stored.blocks] == [2] * -(-n // 2)
    images = [stored.image(index).tobytes() for index in range(n)]
    assert images == [mirror._page(mirror.host, page) for page in mirror.pages]
    assert all(a != b for a, b in itertools.combinations(images, 2))
