"""The ledger over CuPy's pools, on a device that is none: tags, limit, exhaustion, graphs."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from slotd.daemon.memory import Faults, OutOfDeviceMemory
from slotd.daemon.memory.cuda_memory import CudaMemory
from slotd.daemon.memory.interface import PoolKind
from tests.fakes.cuda_device import FakeDevice

MIB = 1 << 20


def make(
    limit: int | None = None, pool_kind: PoolKind = "legacy", capacity: int = 64 * MIB, others: int = 0,
    overhead: int = 0, faults: str | None = None,
) -> CudaMemory:  # fmt: skip
    device = FakeDevice(capacity, others)
    return CudaMemory(device, limit, Faults.parse(faults), pool_kind=pool_kind, overhead=overhead)


@pytest.fixture(params=["legacy", "vmm"])
def kind(request: pytest.FixtureRequest) -> PoolKind:
    chosen: PoolKind = request.param
    return chosen


class Graphs:
    """Someone who captures."""

    def __init__(self, memory: CudaMemory) -> None:
        self.memory = memory
        self.live_when_dropped: list[int] = []

    def capture(self, n: int = MIB) -> int:
        with self.memory.capture_pool(self.drop):
            return int(self.memory.empty((n,), np.uint8).address)

    def drop(self) -> None:
        self.live_when_dropped.append(self.memory.live("scratch"))


# ----- arrays and tags


def test_bytes_count_under_their_tag_until_the_last_view_is_gone(kind: PoolKind) -> None:
    memory = make(pool_kind=kind)
    weights = memory.empty((1000, 3), np.float16, tag="weights")
    scratch = memory.empty((MIB,), np.uint8)
    assert (weights.shape, weights.dtype) == ((1000, 3), np.float16)
    assert memory.by_tag["weights"] == 6144  # whole blocks
    assert (memory.live("scratch"), memory.live(), memory.cached) == (MIB, MIB + 6144, 0)
    view = scratch[5:]
    del scratch
    assert memory.live("scratch") == MIB
    del view
    assert (memory.live("scratch"), memory.cached) == (0, MIB)
    assert memory.trim() == MIB
    assert (memory.cached, memory.live()) == (0, 6144)


def test_a_cycle_gives_its_block_back_too() -> None:
    memory = make()
    cycle = [memory.empty((MIB,), np.uint8)]
    cycle.append(cycle)  # type: ignore[arg-type]
    del cycle
    gc.collect()
    assert memory.live() == 0


def test_nothing_is_no_block() -> None:
    memory = make()
    assert memory.empty((0, 7)).shape == (0, 7)
    assert memory.live() == memory.cached == 0


def test_an_unknown_tag_is_refused_and_counts_nothing() -> None:
    memory = make()
    with pytest.raises(KeyError):
        memory.empty((5,), tag="toys")
    assert memory.live() == memory.cached == 0


def test_what_cupy_takes_by_itself_comes_from_the_same_pool() -> None:
    device = FakeDevice(MIB)
    memory = CudaMemory(device)
    assert device.served is not None
    pointer = device.served.malloc(512)
    assert memory.free == MIB - 512
    del pointer


# ----- limit and exhaustion


def test_the_limit_counts_live_and_cached_blocks() -> None:
    memory = make(limit=4 * MIB)
    small = [memory.empty((MIB,), np.uint8) for _ in range(3)]
    del small
    assert (memory.cached, memory.free, memory.total) == (3 * MIB, MIB, 4 * MIB)
    with pytest.raises(OutOfDeviceMemory) as caught, memory.within("decode"):
        memory.empty((2 * MIB,), np.uint8)
    assert (caught.value.site, caught.value.requested, caught.value.free) == ("decode", 2 * MIB, MIB)
    memory.trim()
    assert memory.empty((4 * MIB,), np.uint8).nbytes == 4 * MIB


def test_the_drivers_pool_keeps_the_limit_too() -> None:
    memory = make(limit=4 * MIB, pool_kind="vmm")
    held = memory.empty((3 * MIB,), np.uint8)
    with pytest.raises(OutOfDeviceMemory):
        memory.empty((2 * MIB,), np.uint8)
    del held
    held = memory.empty((4 * MIB,), np.uint8)  # what it kept went back first
    assert memory.total >= memory.live() == held.nbytes


def test_the_context_counts_within_the_limit(kind: PoolKind) -> None:
    memory = make(limit=4 * MIB, pool_kind=kind, overhead=MIB)
    assert (memory.total, memory.room_for(MIB)) == (3 * MIB, 3)
    with pytest.raises(OutOfDeviceMemory):
        memory.empty((3 * MIB + 1,), np.uint8)
    assert memory.empty((3 * MIB,), np.uint8).nbytes == 3 * MIB


@pytest.mark.parametrize("limit", [0, 100, MIB])
def test_a_limit_that_the_context_fills_leaves_room_for_nothing(kind: PoolKind, limit: int) -> None:
    memory = make(limit=limit, pool_kind=kind, overhead=MIB)
    assert (memory.total, memory.free, memory.room_for(1)) == (0, 0, 0)
    with pytest.raises(OutOfDeviceMemory):
        memory.empty((1,), np.uint8)


def test_the_limit_can_be_lifted(kind: PoolKind) -> None:
    memory = make(limit=MIB, pool_kind=kind)
    with pytest.raises(OutOfDeviceMemory):
        memory.empty((2 * MIB,), np.uint8)
    memory.limit = None
    assert memory.empty((2 * MIB,), np.uint8).nbytes == 2 * MIB


def test_real_exhaustion_is_the_same_failure_and_passes(kind: PoolKind) -> None:
    memory = make(capacity=8 * MIB, others=2 * MIB, pool_kind=kind)
    held = memory.empty((5 * MIB,), np.uint8, tag="kv")
    assert (memory.total, memory.free) == (6 * MIB, MIB)
    with pytest.raises(OutOfDeviceMemory) as caught:
        memory.empty((2 * MIB,), np.uint8)
    assert (caught.value.site, caught.value.requested, caught.value.free) == ("start", 2 * MIB, MIB)
    assert memory.live() == held.nbytes
    del held
    assert memory.empty((2 * MIB,), np.uint8).nbytes == 2 * MIB


def test_without_a_limit_the_pool_gives_what_it_keeps_before_it_fails() -> None:
    memory = make(capacity=4 * MIB)
    held = [memory.empty((MIB,), np.uint8) for _ in range(4)]
    del held
    assert memory.empty((4 * MIB,), np.uint8).nbytes == 4 * MIB


def test_a_failure_of_the_driver_is_named_after_the_site() -> None:
    memory = make(capacity=MIB)

    class DriverError(RuntimeError):
        def __init__(self, status: int) -> None:
            self.status = status

    with (
        pytest.raises(OutOfDeviceMemory, match="site=decode requested=0 free=1048576"),
        memory.within("decode"),
        memory.driver_failures(),
    ):
        raise DriverError(2)
    with pytest.raises(DriverError), memory.driver_failures():
        raise DriverError(700)  # an illegal address is no want of memory


def test_faults_are_injected_at_sites() -> None:
    memory = make(faults="decode:2")
    with memory.site("decode"):
        pass
    with pytest.raises(OutOfDeviceMemory, match="site=decode requested=0"), memory.site("decode"):
        pass


# ----- captured graphs


def test_what_a_graph_names_is_given_to_nobody_else() -> None:
    memory = make()
    graphs = Graphs(memory)
    first = graphs.capture()
    outside = [memory.empty((MIB,), np.uint8).address for _ in range(4)]
    assert first not in outside
    assert graphs.capture() == first  # graphs run one after the other and share their scratch
    memory.trim()
    assert memory.live("scratch") == MIB
    assert graphs.capture() == first
    assert graphs.live_when_dropped == []


def test_retire_drops_the_graphs_and_then_their_memory() -> None:
    memory = make()
    graphs = Graphs(memory)
    graphs.capture(2 * MIB)
    assert memory.live("scratch") == 2 * MIB
    assert memory.retire() == 2 * MIB
    assert (memory.live(), graphs.live_when_dropped) == (0, [2 * MIB])
    assert memory.retire() == 0
    assert graphs.live_when_dropped == [2 * MIB]


def test_graphs_do_not_keep_their_owner_alive() -> None:
    memory = make()
    graphs = Graphs(memory)
    graphs.capture()
    del graphs
    assert memory.retire() == MIB


def test_an_array_of_a_capture_that_is_kept_outlives_a_retire() -> None:
    memory = make()
    graphs = Graphs(memory)
    with memory.capture_pool(graphs.drop):
        kept = memory.empty((MIB,), np.uint8)
        memory.empty((2 * MIB,), np.uint8)
    assert memory.retire() == 2 * MIB
    assert memory.live("scratch") == kept.nbytes


def test_graphs_count_within_the_limit() -> None:
    memory = make(limit=4 * MIB)
    graphs = Graphs(memory)
    graphs.capture(3 * MIB)
    assert memory.free == MIB
    with pytest.raises(OutOfDeviceMemory):
        memory.empty((2 * MIB,), np.uint8)
    with pytest.raises(OutOfDeviceMemory):
        graphs.capture(4 * MIB)
    memory.retire()
    assert memory.empty((2 * MIB,), np.uint8).nbytes == 2 * MIB
    assert memory.cached == 2 * MIB


def test_a_capture_that_fails_ends() -> None:
    memory = make()
    graphs = Graphs(memory)
    with pytest.raises(ZeroDivisionError), memory.capture_pool(graphs.drop):
        1 / 0  # noqa: B018
    memory.empty((MIB,), np.uint8)
    assert memory.cached == MIB


def test_graphs_of_another_tag_have_other_places() -> None:
    memory = make()
    graphs, others = Graphs(memory), Graphs(memory)
    first = graphs.capture()
    with memory.capture_pool(others.drop, "draft"):
        assert memory.empty((MIB,), np.uint8).address != first
    assert graphs.capture() == first
    assert (memory.live("scratch"), memory.live("draft")) == (MIB, MIB)
    assert memory.retire() == 2 * MIB
    assert (memory.live("scratch"), memory.live("draft")) == (0, 0)
