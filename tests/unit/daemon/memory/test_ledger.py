"""The ledger: tags, life of arrays, limit, sites, threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from slotd.daemon.memory import SITES, TAGS, DeviceMemory, Faults, OutOfDeviceMemory
from slotd.daemon.memory.interface import START
from slotd.protocol.errors import SlotdError

MIB = 1024 * 1024


def test_an_array_has_shape_type_and_alignment() -> None:
    array = DeviceMemory().empty((3, 5), np.float16)
    assert array.shape == (3, 5)
    assert array.dtype == np.float16
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert array.ctypes.data % 64 == 0


def test_bytes_are_counted_by_tag() -> None:
    memory = DeviceMemory()
    weights = memory.empty((1024,), tag="weights")
    scratch = memory.empty((512,))
    assert memory.live("weights") == weights.nbytes
    assert memory.live("scratch") == scratch.nbytes
    assert memory.live() == weights.nbytes + scratch.nbytes
    assert memory.by_tag == {**dict.fromkeys(TAGS, 0), "weights": 4096, "scratch": 2048}


def test_a_block_comes_back_when_array_and_views_are_gone() -> None:
    memory = DeviceMemory()
    array = memory.empty((256,))
    view = array.reshape(16, 16)[2:, 1].T
    address = array.ctypes.data
    del array
    assert memory.live("scratch") == 1024
    view[:] = 1
    del view
    assert (memory.live("scratch"), memory.cached) == (0, 1024)
    assert memory.empty((256,)).ctypes.data == address


def test_memory_of_a_view_is_not_handed_out_again() -> None:
    memory = DeviceMemory()
    view = memory.empty((256,))[:8]
    view[:] = 7
    memory.empty((256,))[:] = 0
    assert view.tolist() == [7.0] * 8


def test_empty_shapes_take_nothing() -> None:
    memory = DeviceMemory(limit=0)
    assert memory.empty((0, 5)).shape == (0, 5)
    assert memory.live() == 0


def test_an_unknown_tag_is_a_bug() -> None:
    memory = DeviceMemory()
    with pytest.raises(KeyError):
        memory.empty((1,), tag="toys")
    assert memory.live() == 0


def test_the_limit_counts_live_and_cached() -> None:
    memory = DeviceMemory(limit=4 * MIB)
    held = memory.empty((MIB // 4,))
    memory.empty((MIB // 2,))  # 2 MiB, cached at once
    assert (memory.live(), memory.cached, memory.free, memory.total) == (MIB, 2 * MIB, MIB, 4 * MIB)
    assert (memory.room_for(MIB), memory.room_for(2 * MIB)) == (1, 1)
    with pytest.raises(OutOfDeviceMemory) as caught:
        memory.empty((3 * MIB // 4,))  # 3 MiB: the cached block is in the way, and stays
    assert (caught.value.free, memory.cached) == (MIB, 2 * MIB)
    assert memory.trim() == 2 * MIB
    memory.empty((3 * MIB // 4,))
    assert memory.cached == 3 * MIB
    del held
    assert memory.trim() == 4 * MIB
    assert memory.free == 4 * MIB


def test_over_the_limit_is_out_of_memory_and_changes_nothing() -> None:
    memory = DeviceMemory(limit=4 * MIB)
    held = memory.empty((3 * MIB,), np.uint8)
    with pytest.raises(OutOfDeviceMemory) as caught, memory.site("decode"):
        memory.empty((2 * MIB,), np.uint8)
    error = caught.value
    assert isinstance(error, SlotdError)
    assert (error.site, error.requested, error.free) == ("decode", 2 * MIB, MIB)
    assert str(error) == f"out of device memory: site=decode requested={2 * MIB} free={MIB}"
    assert memory.live() == held.nbytes
    assert memory.empty((MIB,), np.uint8).nbytes == MIB


def test_a_refusal_of_the_system_is_out_of_memory() -> None:
    memory = DeviceMemory()
    with pytest.raises(OutOfDeviceMemory, match="site=start"):
        memory.empty((2**62,), np.uint8)
    assert memory.live() == 0


def test_without_a_limit_the_machine_is_the_limit() -> None:
    memory = DeviceMemory()
    assert memory.total > 64 * MIB
    before = memory.free
    array = memory.empty((MIB,), np.uint8)
    assert memory.free == before - array.nbytes


def test_sites_nest() -> None:
    memory = DeviceMemory()
    assert memory.current_site == START
    with memory.site("restore"):
        with memory.site("commit"):
            assert memory.current_site == "commit"
        assert memory.current_site == "restore"
    assert memory.current_site == START


def test_within_names_a_failure_and_passes_nothing() -> None:
    memory = DeviceMemory(limit=MIB, faults=Faults("prefill_build", 1))
    named = pytest.raises(OutOfDeviceMemory, match=f"site=prefill_build requested={2 * MIB}")
    with named, memory.within("prefill_build"):
        memory.empty((2 * MIB,), np.uint8)
    with pytest.raises(ValueError, match="'nowhere' is not a site"), memory.within("nowhere"):
        pass


def test_a_bare_failure_has_no_traceback() -> None:
    with pytest.raises(OutOfDeviceMemory) as caught:
        DeviceMemory(limit=MIB).empty((2 * MIB,), np.uint8)
    bare = caught.value.bare()
    assert str(bare) == str(caught.value)
    assert bare.__traceback__ is None


def test_a_site_belongs_to_its_thread() -> None:
    memory = DeviceMemory()
    seen: list[str] = []
    with memory.site("decode"):
        thread = threading.Thread(target=lambda: seen.append(memory.current_site))
        thread.start()
        thread.join()
    assert seen == [START]


def test_an_unknown_site_is_a_bug() -> None:
    with pytest.raises(ValueError, match="'nowhere' is not a site"), DeviceMemory().site("nowhere"):
        pass


def test_passing_a_site_raises_its_fault() -> None:
    memory = DeviceMemory(faults=Faults("commit", 2))
    with memory.site("commit"), memory.site("decode"):
        pass
    with pytest.raises(OutOfDeviceMemory, match="site=commit requested=0"), memory.site("commit"):
        pass
    assert memory.current_site == START
    with memory.site("commit"):
        pass


def test_every_site_of_the_design_is_there() -> None:
    assert len(SITES) == len(set(SITES)) == 14


def test_threads_share_one_ledger() -> None:
    memory = DeviceMemory()
    errors: list[str] = []

    def work(number: int) -> None:
        for i in range(300):
            array = memory.empty((64 + i % 7,))
            array[:] = number
            other = memory.empty((16,))
            other[:] = -1
            if not (array == number).all():
                errors.append(f"thread {number}: memory is not its own")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert memory.live() == 0
    assert memory.cached == memory.trim()
