"""Saving and loading a snapshot against what the same disk does with one file and nothing around it.

``python -m tests.bench.disk [FOLDER] [MIB]``. All are measured in turn and several times, because disks vary:
the plain write is one file in large pieces and an fsync at the end; the plain read is the same file from the
disk, dropped from the system's cache before. Pages are as large as those of SmolLM2-135M.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from slotd.daemon.kv.element_types import kv_type
from slotd.daemon.kv.kv_shape import KvShape
from slotd.daemon.kv.page_pieces import PieceReader, PieceWriter
from slotd.daemon.kv.pages import PAGE, pages_for
from slotd.daemon.kv.save_plan import Image
from slotd.daemon.kv.slot_files import Identity
from slotd.daemon.kv.slot_store import SlotStore
from slotd.daemon.kv.store import PageStore
from slotd.daemon.memory import DeviceMemory

MIB = 1 << 20
ROUNDS = 7
PIECE = 8 * MIB


def main(folder: Path | None = None, mib: int = 256) -> None:
    """Print rates and the two ratios; the folder is on the disk that is measured."""
    with tempfile.TemporaryDirectory(dir=folder) as path:
        rates = measure(Path(path), mib * MIB)
    for name, values in rates.items():
        middle, low, high = statistics.median(values), min(values), max(values)
        print(f"{name:<50} {middle / MIB:9.0f} MiB/s ({low / MIB:.0f} .. {high / MIB:.0f})", flush=True)
    for name in ("save", "load"):
        plain = "write" if name == "save" else "read"
        ratio = statistics.median(a / b for a, b in zip(rates[name], rates[f"plain {plain}"], strict=True))
        print(f"{name + ' / plain ' + plain:<50} {ratio:9.2f}     (to reach 0.70)", flush=True)


def measure(path: Path, n_bytes: int) -> dict[str, list[float]]:
    """Bytes a second of plain write, save, plain read and load, ROUNDS of each, one behind the other."""
    rig = Rig(path / "slots", n_bytes)
    data = np.random.default_rng(1).integers(0, 256, PIECE, dtype=np.uint8).tobytes()
    plain = path / "plain"
    works: dict[str, Callable[[], object]] = {
        "plain write": lambda: write_plainly(plain, data, rig.n_bytes),
        "save": rig.save,
        "plain read": lambda: read_plainly(plain),
        "load": rig.load,
    }
    rates: dict[str, list[float]] = {name: [] for name in works}
    for number in range(ROUNDS + 1):  # the first one warms up
        for name, work in works.items():
            rig.prepare(name)
            if name == "plain write":
                plain.unlink(missing_ok=True)
            drop_from_cache(path)
            began = time.perf_counter()
            work()
            if number:
                rates[name].append(rig.n_bytes / (time.perf_counter() - began))
    rig.store.close()
    return rates


class Rig:
    """A store of snapshots, and pages of K/V in memory as the daemon has them."""

    def __init__(self, path: Path, n_bytes: int) -> None:
        self.kv = PageStore(DeviceMemory(), KvShape(30, 3, 64, 64, kv_type("f32"), kv_type("f32")))
        n_pages = max(1, n_bytes // self.kv.page_bytes)
        self.pages = self.kv.allocate(pages_for(n_pages * PAGE))
        self.n_bytes = n_pages * self.kv.page_bytes
        noise = np.random.default_rng(2).integers(0, 256, self.kv.page_bytes, dtype=np.uint8)
        for number, page in enumerate(self.pages):
            noise[:8] = np.frombuffer(np.int64(number).tobytes(), np.uint8)
            self.kv.write_page(page, PAGE, memoryview(noise))
        self.identity = Identity("a" * 32, "b" * 32, "f32", "f32", 0, "float32", PAGE, self.kv.page_bytes)
        self.ids = np.arange(n_pages * PAGE, dtype="<i4").tobytes()
        self.store = SlotStore(path, None)
        self.name = ""

    def prepare(self, what: str) -> None:
        """Before a save nothing of it is stored."""
        if what == "save" and self.name:
            self.store.drop(self.name)

    def save(self) -> None:
        """Store the snapshot."""
        reader = PieceReader(
            self.kv.layout, lambda index, n, buffer: self.kv.read_page(self.pages[index], n, buffer)
        )
        self.name = self.store.save(Image(self.identity, self.ids, b"", reader))

    def load(self) -> None:
        """Read the snapshot into the pages, checked."""
        self.store.find(self.name, self.identity)
        writer = PieceWriter(
            self.kv.layout, lambda index, n, data: self.kv.write_page(self.pages[index], n, data)
        )
        self.store.read(self.name, writer)


def write_plainly(path: Path, data: bytes, n_bytes: int) -> None:
    """One file, in order, and an fsync."""
    with path.open("wb", buffering=0) as file:
        for start in range(0, n_bytes, len(data)):
            file.write(data[: n_bytes - start])
        os.fsync(file.fileno())


def read_plainly(path: Path) -> None:
    """One file, in order."""
    buffer = memoryview(bytearray(PIECE))
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def drop_from_cache(folder: Path) -> None:
    """Have the system forget what it read and wrote, so that a read comes from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


if __name__ == "__main__":
    main(*[Path(sys.argv[1])] if sys.argv[1:] else [], **{"mib": int(sys.argv[2])} if sys.argv[2:] else {})
