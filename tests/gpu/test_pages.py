"""kernels/pages.cu and what copies with it, against the NumPy store; rates beside that of a pinned copy."""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Callable
from functools import partial

import cupy
import numpy as np
import pytest

from slotd.daemon.arena_directory import make_arena
from slotd.daemon.kv.cuda_store import CudaPageStore
from slotd.daemon.kv.element_types import kv_type
from slotd.daemon.kv.host_arena import HostArena
from slotd.daemon.kv.kv_shape import KvShape
from slotd.daemon.memory.cuda_memory import CudaMemory, CupyDevice
from slotd.daemon.ops.cuda_attention_shape import KV_TYPE_NUMBERS
from slotd.daemon.ops.cuda_pages import MOST_ENTRIES, CudaPages
from slotd.daemon.ops.page_layout import Bytes
from tests.fakes.page_mirror import Mirror

#: Narrow rows (not of 16 bytes) in one plane, in both, in none; heads of 32 numbers make the smallest rows.
PAIRS = [*((name, "f16") for name in KV_TYPE_NUMBERS), ("f32", "q4_0"), ("q8_0", "q5_1"), ("bf16", "f32")]
SHAPES = [(2, 3, 64, 32), (3, 1, 128, 128), (1, 2, 32, 32)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("types", PAIRS, ids="-".join)
@pytest.mark.parametrize("check", ["copies", "moves", "pages_outside", "single_pages"])
def test_p52_bytes_arrive_where_they_belong(memory, shape, types, check) -> None:
    mirror = Mirror(CudaPages, memory, 20, types, shape)
    assert mirror.differing() == []
    getattr(mirror, f"check_{check}")()


def test_more_pages_than_one_launch_or_transfer_takes(memory, monkeypatch) -> None:
    monkeypatch.setattr("slotd.daemon.ops.cuda_pages.STAGING_BYTES", 1 << 19)
    monkeypatch.setattr("slotd.daemon.ops.cuda_pages.BLOCK_BYTES", 1 << 17)
    mirror = Mirror(CudaPages, memory, 6 * MOST_ENTRIES, shape=(1, 1, 64, 64))
    assert mirror.cuda._copies.pages_per_block > 1
    mirror.check_pages_outside()
    gone = [page for page in mirror.pages if page % 3]
    for store in (mirror.host, mirror.cuda):
        store.pages.release(gone)
    moves = mirror.host.compact()
    assert mirror.cuda.compact() == moves
    assert len(moves) > MOST_ENTRIES
    mirror.pages = [moves.get(page, page) for page in mirror.pages if page % 3 == 0]
    assert mirror.differing() == []


def test_too_many_tokens_to_move_are_refused(memory) -> None:
    mirror = Mirror(CudaPages, memory, 2)
    places = [(mirror.pages[0], 0)] * (MOST_ENTRIES + 1)
    with pytest.raises(ValueError, match="65 tokens to move, the limit is 64"):
        mirror.cuda.move(places, places)


def test_a_read_waits_for_what_is_enqueued(memory) -> None:
    """A page is read from another thread while the step that writes it still waits behind slow work."""
    mirror = Mirror(CudaPages, memory, 4)
    source, target = mirror.pages[:2]
    busy = cupy.ones((1 << 26,), cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(200):
            busy *= 1.0
        mirror.cuda.copy(source, target, 64)
        mirror.cuda.settle()
    seen = bytearray(mirror.cuda.page_bytes)
    reader = threading.Thread(target=mirror.cuda.read_page, args=(target, 64, memoryview(seen)))
    reader.start()
    reader.join(60)
    assert not reader.is_alive()
    assert bytes(seen) == mirror._page(mirror.host, source)
    stream.synchronize()


def test_pages_can_go_out_when_the_device_is_full(memory) -> None:
    mirror = Mirror(CudaPages, memory, 20)
    refused = []
    memory.empty = lambda *args, **kwargs: refused.append(args) or 1 / 0
    mirror.check_pages_outside()
    assert refused == []
    del memory.empty


# ----- figures


@pytest.fixture
def large() -> CudaPageStore:
    """Pages of 64 layers, 8 key/value heads of 128, float16: 262,144 bytes a token."""
    f16 = kv_type("f16")
    return CudaPageStore(CudaPages, CudaMemory(CupyDevice()), KvShape(64, 8, 128, 128, f16, f16))


def test_rates_to_host_memory_and_back(large, capsys) -> None:
    n_tokens = 4096
    pages = large.allocate(n_tokens // 64)
    n_bytes = n_tokens * large.bytes_per_token
    large.write(pages, large.read(pages, n_tokens))  # the blocks are pinned now, and kept
    held = []

    def out() -> None:
        held[:] = [large.read(pages, n_tokens)]

    rates = {
        "a pinned copy": n_bytes / median_seconds(pinned_copy(n_bytes)),
        "pages to the host": n_bytes / median_seconds(out),
        "pages from the host": n_bytes / median_seconds(lambda: large.write(pages, held[0])),
    }
    with capsys.disabled():
        print("\n" + ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates.items()))
    assert rates["pages to the host"] > 0.6 * rates["a pinned copy"]
    assert rates["pages from the host"] > 0.6 * rates["a pinned copy"]


def test_shared_memory_is_page_locked_as_slots_use_it(large, capsys) -> None:
    """The host tier of an engine process: bytes, rates, and memory that went back to the system meanwhile."""
    descriptor = make_arena(3 << 30)
    assert descriptor is not None
    arena = HostArena(descriptor, 3 << 30, recorded=False)
    n_tokens = 4096
    pages = large.allocate(n_tokens // 64)
    n_bytes = n_tokens * large.bytes_per_token
    noise = np.random.default_rng(3).bytes(n_bytes)
    large.write(pages, large.stored(np.frombuffer(noise, np.uint8).reshape(len(pages), -1), n_tokens))

    def room(n_pages: int) -> Bytes:
        found = arena.room(n_pages, large.page_bytes, {}, array("i", [1]), None)
        assert found is not None
        return found.images

    unlocked = room(len(pages))
    rates = {
        "a pinned copy": n_bytes / median_seconds(pinned_copy(n_bytes)),
        "out, not locked": n_bytes / median_seconds(partial(large.read, pages, n_tokens, unlocked)),
    }
    assert unlocked.tobytes() == noise
    large.pin(arena)
    images = room(len(pages))
    first = partial(large.read, pages, n_tokens, images)
    rates["out, the first time"] = n_bytes / median_seconds(first, 1)
    assert images.tobytes() == noise
    stretch = large._copies._stretch
    assert n_bytes <= stretch.known <= arena.taken + 4096, "the driver refused, see the log"
    rates["out"] = n_bytes / median_seconds(first)
    stored = large.stored(images, n_tokens)
    rates["back"] = n_bytes / median_seconds(partial(large.write, pages, stored))
    with capsys.disabled():
        print("\n" + ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates.items()))
    other = np.random.default_rng(4).bytes(n_bytes)
    images[...] = np.frombuffer(other, np.uint8).reshape(images.shape)
    large.write(pages, stored)
    assert b"".join(large.read(pages, n_tokens).image(n).tobytes() for n in range(len(pages))) == other
    taken = arena.taken
    del unlocked, images, stored, first
    small = room(1)  # what is free goes back
    assert arena.taken < taken
    again = room(len(pages))
    again[...] = 0
    large.read(pages, n_tokens, again)
    assert again.tobytes() == other, "the driver wrote to pages that are not there any more"
    del small, again
    os.close(descriptor)
    assert rates["out"] > 0.6 * rates["a pinned copy"], rates
    assert rates["back"] > 0.6 * rates["a pinned copy"], rates


def test_the_time_of_a_move_and_of_a_page(large, capsys) -> None:
    """What the commit of a tree's path and a page made private cost: host alone, and until it is done."""
    first, second = large.allocate(2)
    sources, targets = [(first, p) for p in range(1, 9)], [(first, p) for p in range(8)]
    works: dict[str, Callable[[], object]] = {
        "move of 8 tokens": lambda: large.move(sources, targets),
        "copy of a page": lambda: large.copy(first, second, 64),
    }
    stream = cupy.cuda.get_current_stream()
    for name, work in works.items():
        work()
        stream.synchronize()
        began = time.perf_counter()
        for _ in range(100):
            work()
        enqueued = time.perf_counter() - began
        stream.synchronize()
        done = time.perf_counter() - began
        with capsys.disabled():
            print(f"\n{name}: {1e4 * enqueued:.1f} us of the host, done in {1e4 * done:.1f} us", end="")
        assert done < 100 * 2e-3  # two milliseconds each would be seen in every step


def median_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds))


def pinned_copy(n_bytes: int) -> Callable[[], None]:
    """One copy of n_bytes from the device into pinned memory."""
    host = cupy.cuda.alloc_pinned_memory(n_bytes)
    device = cupy.zeros((n_bytes,), cupy.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()

    def copy() -> None:
        to_host = cupy.cuda.runtime.memcpyDeviceToHost
        cupy.cuda.runtime.memcpyAsync(host.ptr, device.data.ptr, n_bytes, to_host, stream.ptr)
        stream.synchronize()

    return copy
