"""Page files: K/V of stored snapshots, in pieces, and the ids they are of. Pure functions, as `slot_files`.

A **piece** is K/V of consecutive tokens of one page, as they are stored: of a whole page, or of the tokens
that one snapshot added to it. Behind the frame stands a table with an entry for each piece, then the ids of
all of them (int32), then the pieces one behind the other.

A piece is named by two hashes: of all ids in front of it, and of all ids up to its end, each with the
identity of the arithmetic. Where one piece ends, the next one of the same text begins with the same hash.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from dataclasses import asdict, dataclass
from itertools import accumulate

from slotd.daemon.kv.slot_files import BadFile, Identity, Read, count_in, encode_frame, read_frame
from slotd.protocol.slot_identity import HASH_BYTES

PAGES_MAGIC = b"slotdPGS"

_ENTRY = struct.Struct(f"<{HASH_BYTES}s{HASH_BYTES}sIII")


class Prefixes:
    """The hash of each beginning of some ids: of the identity, and of the ids up to a position.

    Args:
        identity: of the arithmetic.
        ids: int32 little-endian bytes.
    """

    def __init__(self, identity: Identity, ids: bytes) -> None:
        seed = json.dumps(asdict(identity), sort_keys=True).encode()
        self._step = 4 * identity.page
        self._ids = ids
        self._pages = [_hash(seed)]
        for start in range(0, len(ids) - self._step + 1, self._step):
            self._pages.append(_hash(self._pages[-1] + ids[start : start + self._step]))

    def __call__(self, position: int) -> bytes:
        """The hash of the ids in front of a position."""
        page, rest = divmod(4 * position, self._step)
        if not rest:
            return self._pages[page]
        start = page * self._step
        return _hash(self._pages[page] + self._ids[start : start + rest])


@dataclass(frozen=True, slots=True)
class PageEntry:
    """One piece of a page file.

    Attributes:
        start, end: hashes of all ids in front of it, and of all up to its end.
        offset: place of its first token in the page.
        n: how many tokens.
        crc: CRC-32 of its bytes.
    """

    start: bytes
    end: bytes
    offset: int
    n: int
    crc: int


@dataclass(frozen=True, slots=True)
class PageTable:
    """The head of a page file.

    Attributes:
        token_bytes: bytes of each token.
        entries: what the pieces are, in file order.
        ids: int32 little-endian bytes of all of them.
    """

    token_bytes: int
    entries: tuple[PageEntry, ...]
    ids: bytes

    @property
    def name(self) -> str:
        """The file's name without suffix: a hash of what is in it."""
        return _hash(_pack_entries(self.entries)).hex()

    @property
    def data_start(self) -> int:
        """Byte offset of the first piece; what stands in front of it always has this length."""
        return len(encode_page_table(self))

    @property
    def offsets(self) -> list[int]:
        """Tokens of the file in front of each piece, and behind the last one."""
        return [0, *accumulate(entry.n for entry in self.entries)]


def encode_page_table(table: PageTable) -> bytes:
    """What stands in front of the pieces."""
    packed = _pack_entries(table.entries)
    # Checksums are text of a fixed length, so that the place of the first piece is known before the pieces.
    header = {
        "token_bytes": table.token_bytes, "pieces": len(table.entries), "tokens": len(table.ids) // 4,
        "table_crc": _hex_crc(packed), "ids_crc": _hex_crc(table.ids),
    }  # fmt: skip
    return encode_frame(PAGES_MAGIC, header) + packed + table.ids


def decode_page_table(read: Read, file_bytes: int) -> PageTable:
    """The table of a page file, checked against the file's length.

    Raises:
        BadFile: it is not one, is cut, or is damaged. The pieces themselves are not looked at.
    """
    header, start = read_frame(read, PAGES_MAGIC)
    token_bytes, n, tokens = (count_in(header, name) for name in ("token_bytes", "pieces", "tokens"))
    if start + n * _ENTRY.size + tokens * (4 + token_bytes) != file_bytes:
        raise BadFile("length")
    packed = read(start, n * _ENTRY.size)
    if header.get("table_crc") != _hex_crc(packed):
        raise BadFile("table_checksum")
    ids = read(start + len(packed), 4 * tokens)
    if header.get("ids_crc") != _hex_crc(ids):
        raise BadFile("ids_checksum")
    table = PageTable(token_bytes, tuple(PageEntry(*entry) for entry in _ENTRY.iter_unpack(packed)), ids)
    if table.data_start != start + len(packed) + len(ids) or table.offsets[-1] != tokens:
        raise BadFile("header")  # valid JSON, but not what is written here
    return table


def _pack_entries(entries: tuple[PageEntry, ...]) -> bytes:
    return b"".join(
        _ENTRY.pack(entry.start, entry.end, entry.offset, entry.n, entry.crc) for entry in entries
    )


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()


def _hex_crc(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"
