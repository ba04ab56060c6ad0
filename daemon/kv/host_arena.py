"""The host tier's memory: one shared piece, from which slots get room and in which they survive the process.

Memory is taken in pieces as slots need it, before they are written, so running out is an error and never a
signal. What is free at the end of the arena goes back to the system, but for one piece and as much as the
largest slot has: a slot that is filled again and again is written beside what it held, and would else get its
memory from the system each time.

An array that was handed out carries its own life, as in `memory.ledger`: when it and its views are gone, its
room is free. Checksums are made on a thread of their own, behind the move: until its checksum is there a slot
does not count as kept, and nothing waits for it.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import queue
import threading
import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.daemon.arena_directory import DIRECTORY_BYTES, MOST_ENTRIES, ArenaDirectory, ArenaEntry
from slotd.daemon.ops.page_layout import Bytes

log = logging.getLogger(__name__)

#: Memory is taken in pieces of twice what is taken already, the first and the largest of these sizes.
FIRST_PIECE, PIECE = 1 << 20, 256 << 20

#: Payloads, and the images in them, start at multiples of this.
ALIGNMENT = 4096

#: In front of the text of a payload: its length.
LENGTH_BYTES = 8


@dataclass(slots=True, eq=False)
class _Payload:
    """One slot's bytes.

    Attributes:
        offset, length: in the arena.
        slot: the number it is bound to, None: to none.
        place: of its entry in the directory, None: it has none.
        checksum: CRC-32, None: not made yet.
        view: weak, of what was handed out.
    """

    offset: int
    length: int
    slot: int | None = None
    place: int | None = None
    checksum: int | None = None
    summing: bool = False
    view: weakref.ref[memoryview] | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """A slot's place in the arena, taken while one of these is.

    Attributes:
        images: uint8 [pages, page bytes].
        state: uint8 [state bytes], right behind them.
    """

    images: Bytes
    state: Bytes


@dataclass(frozen=True, slots=True)
class Survivor:
    """What the directory says of a slot.

    Attributes:
        about: what was said of it when it was written.
        tokens: its ids.
        logits: float32 [n_vocab] or None.
        room: the rest of it, in the arena.
    """

    about: Mapping[str, Any]
    tokens: array[int]
    logits: npt.NDArray[np.float32] | None
    room: Room


class HostArena:
    """Room for slots in shared memory. Thread-safe.

    Args:
        descriptor: of `make_arena`.
        budget: most bytes of slots, for the tier's own account.
        recorded: keep the directory, for a process that comes after this one.

    Attributes:
        address, size: of all of it; memory is there for the first `taken` bytes.
        on_release: called with an address before the memory from there on goes back to the system.
    """

    def __init__(self, descriptor: int, budget: int, *, recorded: bool) -> None:
        self.budget = budget
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size
        self._cells = mmap.mmap(descriptor, self.size)
        self._recorded = recorded
        self._directory = ArenaDirectory(self._cells)
        self._payloads: dict[int, _Payload] = {}  # by address of the images
        self._released: deque[int] = deque()
        self._lock = threading.RLock()
        self.address = int(np.frombuffer(self._cells, np.uint8).ctypes.data)
        self.on_release: Callable[[int], None] = lambda address: None
        self._generation = max((entry.generation for entry in self._directory.entries().values()), default=0)
        self._taken = DIRECTORY_BYTES  # how far memory was taken from the system
        self._sums: queue.SimpleQueue[tuple[_Payload, Bytes]] | None = None

    @property
    def taken(self) -> int:
        """Bytes of the system's memory that it holds."""
        with self._lock:
            return self._taken

    # ----- room

    def room(
        self, n_pages: int, page_bytes: int, about: Mapping[str, Any], tokens: array[int],
        logits: npt.NDArray[np.float32] | None, state_bytes: int = 0,
    ) -> Room | None:  # fmt: skip
        """Room for the page images and the state of a slot, to be filled; the rest is written.

        about: JSON values that come back with it.

        Returns:
            None: no hole is large enough.

        Raises:
            MemoryError: the system has no memory left.
        """
        head = _head(about, tokens, logits, n_pages, page_bytes, state_bytes)
        start = _aligned(len(head))
        with self._lock:
            self._take_back()
            payload = self._place(start + n_pages * page_bytes + state_bytes)
            if payload is None:
                return None
            self._cells[payload.offset : payload.offset + len(head)] = head
            return self._hand_out(payload, start, n_pages, page_bytes)

    def _place(self, length: int) -> _Payload | None:
        """The first hole that is large enough, with memory behind it."""
        offset = _aligned(DIRECTORY_BYTES)
        for payload in sorted(self._payloads.values(), key=lambda each: each.offset):
            if payload.offset - offset >= length:
                break
            offset = _aligned(payload.offset + payload.length)
        if offset + length > self.size:
            return None
        self._take(offset + length)
        return _Payload(offset, length)

    def _take(self, end: int) -> None:
        if end <= self._taken:
            return
        end = min(max(end, self._taken + min(PIECE, max(self._taken, FIRST_PIECE))), self.size)
        try:
            os.posix_fallocate(self._descriptor, self._taken, end - self._taken)
        except OSError as error:
            self._give_back(self._taken)  # what it got before it failed
            raise MemoryError(f"no {end - self._taken} bytes for the host tier: {error.strerror}") from None
        self._taken = end

    def _hand_out(self, payload: _Payload, start: int, n_pages: int, page_bytes: int) -> Room:
        first = payload.offset + start
        view = memoryview(self._cells)[first : payload.offset + payload.length]
        flat = np.frombuffer(view, np.uint8)
        address = self.address + first
        owner = flat.base
        assert isinstance(owner, memoryview)
        payload.view = weakref.ref(owner, lambda _: self._released.append(address))
        self._payloads[address] = payload
        n_bytes = n_pages * page_bytes
        return Room(flat[:n_bytes].reshape(n_pages, page_bytes), flat[n_bytes:])

    def _take_back(self) -> None:
        while self._released:
            payload = self._payloads.pop(self._released.popleft())
            self._unrecord(payload)
        held = self._payloads.values()
        end = max((payload.offset + payload.length for payload in held), default=DIRECTORY_BYTES)
        end += PIECE + max((payload.length for payload in held), default=0)
        if end < self._taken:
            self._give_back(end)

    def _give_back(self, end: int) -> None:
        self.on_release(self.address + end)
        os.ftruncate(self._descriptor, end)
        os.ftruncate(self._descriptor, self.size)
        self._taken = end

    # ----- the directory

    def record(self, bound: Mapping[int, Bytes]) -> None:
        """Make the directory say which slot has which images; those of no slot are none of it any more."""
        with self._lock:
            self._take_back()
            if not self._recorded:
                return
            slots = {images.ctypes.data: slot for slot, images in bound.items()}
            for address, payload in self._payloads.items():
                slot = slots.get(address)
                if slot != payload.slot:
                    self._unrecord(payload)
                    payload.slot = slot
                if slot is not None:
                    self._publish(payload, bound[slot])

    def _publish(self, payload: _Payload, images: Bytes) -> None:
        if payload.place is not None:
            return
        if payload.checksum is not None:
            self._write(payload)
        elif not payload.summing:
            payload.summing = True
            if self._sums is None:
                self._sums = queue.SimpleQueue()
                threading.Thread(target=self._sum_all, name="slotd-sums", daemon=True).start()
            self._sums.put((payload, images))  # the images keep it where it is

    def _sum_all(self) -> None:
        assert self._sums is not None
        while True:
            self._sum(*self._sums.get())

    def _sum(self, payload: _Payload, images: Bytes) -> None:
        start, end = payload.offset, payload.offset + payload.length
        with memoryview(self._cells) as whole, whole[start:end] as bytes_of_it:
            checksum = zlib.crc32(bytes_of_it)
        with self._lock:
            payload.checksum = checksum
            if payload.slot is not None and payload.place is None:
                self._write(payload)

    def _write(self, payload: _Payload) -> None:
        used = {other.place for other in self._payloads.values()}
        free = next((place for place in range(MOST_ENTRIES) if place not in used), None)
        if free is None:
            return  # it is not kept, nothing else is wrong
        assert payload.slot is not None
        assert payload.checksum is not None
        payload.place = free
        self._generation += 1
        self._directory.write(
            free,
            ArenaEntry(payload.slot, payload.offset, payload.length, payload.checksum, self._generation),
        )

    def _unrecord(self, payload: _Payload) -> None:
        if payload.place is not None:
            self._directory.clear(payload.place)
            payload.place = None

    # ----- after another process

    def survivors(self) -> dict[int, Survivor]:
        """What the directory has, by slot; whoever calls it has checked the checksums."""
        found = {}
        with self._lock:
            entries = self._directory.entries()
            end = max((entry.offset + entry.length for entry in entries.values()), default=DIRECTORY_BYTES)
            self._taken = max(self._taken, end)
            for place, entry in entries.items():
                payload = _Payload(entry.offset, entry.length, entry.slot, place, entry.checksum)
                found[entry.slot] = self._survivor(payload)
        return found

    def _survivor(self, payload: _Payload) -> Survivor:
        at = payload.offset + LENGTH_BYTES
        length = int.from_bytes(self._cells[payload.offset : at], "little")
        about = json.loads(self._cells[at : at + length])
        at += length
        tokens = array("i", self._cells[at : at + 4 * about["n_tokens"]])
        at += 4 * about["n_tokens"]
        logits = None
        if about["n_logits"]:
            logits = np.frombuffer(self._cells[at : at + 4 * about["n_logits"]], np.float32)
            at += 4 * about["n_logits"]
        start = _aligned(at - payload.offset)
        return Survivor(
            about, tokens, logits, self._hand_out(payload, start, about["n_pages"], about["page_bytes"])
        )


def open_arena(descriptor: int | None, budget: int, *, recorded: bool) -> HostArena | None:
    """As HostArena; None when there is none, or this process may not have so much address space."""
    if descriptor is None:
        return None
    try:
        return HostArena(descriptor, budget, recorded=recorded)
    except OSError as error:
        log.warning("the host tier is ordinary memory, which does not outlive this process: %s", error)
        return None


def _head(
    about: Mapping[str, Any], tokens: array[int], logits: npt.NDArray[np.float32] | None, n_pages: int,
    page_bytes: int, state_bytes: int,
) -> bytes:  # fmt: skip
    sizes = {
        "n_tokens": len(tokens), "n_logits": 0 if logits is None else len(logits), "n_pages": n_pages,
        "page_bytes": page_bytes, "n_state": state_bytes,
    }  # fmt: skip
    text = json.dumps({**about, **sizes}).encode()
    parts = [len(text).to_bytes(LENGTH_BYTES, "little"), text, tokens.tobytes()]
    if logits is not None:
        parts.append(np.ascontiguousarray(logits, np.float32).tobytes())
    return b"".join(parts)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
