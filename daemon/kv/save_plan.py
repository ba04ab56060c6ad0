"""What a snapshot consists of when it is saved: pieces that are on disk already, and those to be written."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

from slotd.daemon.kv.page_files import PageEntry, Prefixes
from slotd.daemon.kv.page_transfer import ReadPage, Wanted, blank_table
from slotd.daemon.kv.slot_files import Blob, Identity, Part
from slotd.daemon.kv.slot_index import Place, SlotIndex
from slotd.protocol.slot_identity import HASH_BYTES


@dataclass(frozen=True, slots=True)
class Image:
    """A snapshot to be saved.

    Attributes:
        identity: what its K/V depend on.
        ids: int32 little-endian bytes of the ids it covers.
        logits: float32 little-endian bytes of the logits that follow, or none.
        read_page: gives its K/V.
        state: of the recurrent layers; None: the model has none.
    """

    identity: Identity
    ids: bytes
    logits: bytes
    read_page: ReadPage
    state: Blob | None = None

    @property
    def length(self) -> int:
        """Tokens it covers."""
        return len(self.ids) // 4


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The pieces of an image in order, each with its place on disk, None for one to be written."""

    image: Image
    pieces: list[tuple[Wanted, Place | None]]

    @property
    def missing(self) -> list[Wanted]:
        """Pieces to be written."""
        return [piece for piece, place in self.pieces if place is None]

    @property
    def missing_ids(self) -> bytes:
        """The ids of those."""
        return b"".join(self.image.ids[4 * piece.at : 4 * (piece.at + piece.n)] for piece in self.missing)

    @property
    def reused(self) -> set[str]:
        """Page files that are needed beside the new one."""
        return {place[0] for _, place in self.pieces if place is not None}

    @property
    def new_page_bytes(self) -> int:
        """Length of the page file to be written."""
        if not self.missing:
            return 0
        identity, ids = self.image.identity, self.missing_ids
        table = blank_table(identity.token_bytes, identity.page, self.missing, ids)
        return table.data_start + len(ids) // 4 * identity.token_bytes

    def parts(self, new: str = "0" * 2 * HASH_BYTES) -> tuple[Part, ...]:
        """Where all pieces are when those to be written lie in page file `new`."""
        parts: list[Part] = []
        written = 0
        for _, place in self.pieces:
            if place is None:
                place = (new, written)
                written += 1
            name, index = place
            last = parts[-1] if parts else None
            if last is not None and last.name == name and last.first + last.count == index:
                parts[-1] = Part(name, last.first, last.count + 1)
            else:
                parts.append(Part(name, index, 1))
        return tuple(parts)


def plan_save(image: Image, index: SlotIndex | None, check_stop: Callable[[], None]) -> SavePlan:
    """Look for the pieces of an image among those on disk; with no index all are to be written.

    A piece is reused where the ids in front of it, its own, and its very bytes are the same.
    """
    identity = image.identity
    prefixes = Prefixes(identity, image.ids)
    buffer = memoryview(bytearray(identity.page_bytes))

    def is_here(entry: PageEntry, at: int) -> bool:
        if entry.end != prefixes(at + entry.n):
            return False
        check_stop()
        data = buffer[: entry.n * identity.token_bytes]
        image.read_page(at // identity.page, at % identity.page, entry.n, data)
        return zlib.crc32(data) == entry.crc

    pieces: list[tuple[Wanted, Place | None]] = []
    at = 0
    while at < image.length:
        start, n, found = prefixes(at), min(identity.page - at % identity.page, image.length - at), None
        for entry, place in index.pieces_from(start, n) if index is not None else ():
            if is_here(entry, at):
                n, found = entry.n, place
                break
        pieces.append((Wanted(at, n, start, prefixes(at + n)), found))
        at += n
    return SavePlan(image, pieces)
