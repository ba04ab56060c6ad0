"""The two kinds of files that stored snapshots are made of. Pure functions: bytes in, bytes out.

A **page file** holds whole pages of K/V as they are stored, one behind the other, with a table of what they
are. A **manifest** is one snapshot: its ids, which pages of which page files it consists of, the tokens of
its last page when that is not full, and the logits that follow. A longer prefix names the page files of the
shorter one and adds one, so nothing is written twice.

Both start with the same frame::

    8 bytes   magic, one for each kind
    uint32    format version
    uint32    n, length of the header
    n bytes   header, JSON in UTF-8
    uint32    CRC-32 of everything above

and go on with the sections that the header names. Numbers are little-endian. Every byte of a file is covered
by a checksum: of the frame, of the table, of each page, or of its section.

A page is named by a chain: its hash covers the identity of the arithmetic and all ids up to its end.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from slotd.protocol.slot_identity import HASH_BYTES

FORMAT_VERSION = 1
MANIFEST_MAGIC = b"slotdSNP"
PAGES_MAGIC = b"slotdPGS"

_FRAME = struct.Struct("<8sII")
_CRC = struct.Struct("<I")
_ENTRY = struct.Struct(f"<{HASH_BYTES}sI")

#: A header is never longer; a damaged length must not make anybody read gigabytes.
_LONGEST_HEADER = 1 << 24

#: read(offset, n): n bytes of a file from an offset on, fewer at its end.
Read = Callable[[int, int], bytes]


class BadFile(Exception):
    """A file is not what it has to be; `reason` is one word for the error line."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class Identity:
    """What K/V depend on beside the ids. A snapshot is loaded only where all of it is the same.

    Attributes:
        model: the model as HELLO names it (hash of header, tensor table and samples).
        content: hash of the whole model file.
        k, v: how K and V are stored.
        window: attention window in tokens, 0 = full.
        math: float32 or exact.
        page: tokens in a page.
        page_bytes: bytes of a page.
    """

    model: str
    content: str
    k: str
    v: str
    window: int
    math: str
    page: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class PageEntry:
    """One page of a page file: its chain hash, and the CRC-32 of its bytes."""

    chain: bytes
    crc: int


@dataclass(frozen=True, slots=True)
class PageTable:
    """The head of a page file.

    Attributes:
        page_bytes: bytes of each page.
        entries: what the pages are, in file order.
    """

    page_bytes: int
    entries: tuple[PageEntry, ...]

    @property
    def name(self) -> str:
        """The file's name without suffix: a hash of what is in it."""
        return hashlib.blake2b(_pack_entries(self.entries), digest_size=HASH_BYTES).hexdigest()

    @property
    def data_start(self) -> int:
        """Byte offset of the first page; the table in front of it always has this length."""
        return len(encode_page_table(self))


@dataclass(frozen=True, slots=True)
class Part:
    """`count` pages of page file `name`, from page `first` on."""

    name: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Section:
    """Some bytes of a manifest file: where they are, and their CRC-32."""

    start: int
    n_bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The head of a manifest file.

    Attributes:
        identity: what it has to be loaded with.
        ids: int32 little-endian bytes of the ids it covers.
        parts: where its whole pages are, in order.
        tail: K/V of the tokens behind the last whole page.
        logits: float32 little-endian logits that follow, or no bytes.
        file_bytes: length of the file.
    """

    identity: Identity
    ids: bytes
    parts: tuple[Part, ...]
    tail: Section
    logits: Section
    file_bytes: int

    @property
    def length(self) -> int:
        """Tokens it covers."""
        return len(self.ids) // 4

    @property
    def n_pages(self) -> int:
        """Whole pages it consists of."""
        return self.length // self.identity.page

    @property
    def tail_tokens(self) -> int:
        """Tokens behind the last whole page."""
        return self.length % self.identity.page


def chain_hashes(identity: Identity, ids: bytes) -> list[bytes]:
    """The hash of each whole page of these ids: of the identity, and of all ids up to the page's end."""
    link = hashlib.blake2b(
        json.dumps(asdict(identity), sort_keys=True).encode(), digest_size=HASH_BYTES
    ).digest()
    hashes = []
    step = 4 * identity.page
    for start in range(0, len(ids) - step + 1, step):
        link = hashlib.blake2b(link + ids[start : start + step], digest_size=HASH_BYTES).digest()
        hashes.append(link)
    return hashes


# --------------------------------------------------------------------------------------------------
# Page files


def encode_page_table(table: PageTable) -> bytes:
    """What stands in front of the pages."""
    packed = _pack_entries(table.entries)
    # The checksum is text of a fixed length, so that the place of the first page is known before the pages.
    header = {
        "page_bytes": table.page_bytes, "pages": len(table.entries), "table_crc": f"{zlib.crc32(packed):08x}"
    }  # fmt: skip
    return _frame(PAGES_MAGIC, header) + packed


def decode_page_table(read: Read, file_bytes: int) -> PageTable:
    """The table of a page file, checked against the file's length.

    Raises:
        BadFile: it is not one, is cut, or is damaged. The pages themselves are not looked at.
    """
    header, start = _read_frame(read, PAGES_MAGIC)
    page_bytes, n = _count(header, "page_bytes"), _count(header, "pages")
    if start + n * (_ENTRY.size + page_bytes) != file_bytes:
        raise BadFile("length")
    packed = read(start, n * _ENTRY.size)
    if header.get("table_crc") != f"{zlib.crc32(packed):08x}":
        raise BadFile("table_checksum")
    table = PageTable(page_bytes, tuple(PageEntry(*entry) for entry in _ENTRY.iter_unpack(packed)))
    if table.data_start != start + len(packed):
        raise BadFile("header")  # valid JSON, but not what is written here
    return table


def _pack_entries(entries: tuple[PageEntry, ...]) -> bytes:
    return b"".join(_ENTRY.pack(entry.chain, entry.crc) for entry in entries)


# --------------------------------------------------------------------------------------------------
# Manifests


def encode_manifest(
    identity: Identity, ids: bytes, parts: tuple[Part, ...], tail: bytes, logits: bytes
) -> bytes:
    """A whole manifest file."""
    sections = {"ids": ids, "tail": tail, "logits": logits}
    header = {
        "identity": asdict(identity),
        "parts": [[part.name, part.first, part.count] for part in parts],
        "sections": [[name, len(data), zlib.crc32(data)] for name, data in sections.items()],
    }
    return _frame(MANIFEST_MAGIC, header) + b"".join(sections.values())


def decode_manifest(read: Read, file_bytes: int) -> Manifest:
    """The head of a manifest file, checked against the file's length and against itself.

    Raises:
        BadFile: it is not one, is cut, or is damaged. `tail` and `logits` are not looked at.
    """
    header, start = _read_frame(read, MANIFEST_MAGIC)
    sections = dict(_sections(header, start))
    if set(sections) != {"ids", "tail", "logits"}:
        raise BadFile("header")
    if start + sum(section.n_bytes for section in sections.values()) != file_bytes:
        raise BadFile("length")
    ids = read_section(read, sections["ids"], "ids")
    manifest = Manifest(
        identity=_identity(header.get("identity")), ids=ids, parts=tuple(_parts(header)),
        tail=sections["tail"], logits=sections["logits"], file_bytes=file_bytes,
    )  # fmt: skip
    _check(manifest)
    return manifest


def read_section(read: Read, section: Section, name: str) -> bytes:
    """The bytes of a section.

    Raises:
        BadFile: they do not fit its checksum.
    """
    data = read(section.start, section.n_bytes)
    if len(data) != section.n_bytes or zlib.crc32(data) != section.crc:
        raise BadFile(f"{name}_checksum")
    return data


def _sections(header: Mapping[str, Any], start: int) -> Iterator[tuple[str, Section]]:
    for entry in _list(header, "sections"):
        match entry:
            case [str(name), int(n_bytes), int(crc)] if n_bytes >= 0 and 0 <= crc < 1 << 32:
                yield name, Section(start, n_bytes, crc)
                start += n_bytes
            case _:
                raise BadFile("header")


def _parts(header: Mapping[str, Any]) -> Iterator[Part]:
    for entry in _list(header, "parts"):
        match entry:
            case [str(name), int(first), int(count)] if is_hash(name) and first >= 0 and count > 0:
                yield Part(name, first, count)
            case _:
                raise BadFile("header")


def _identity(data: Any) -> Identity:
    if not isinstance(data, dict) or set(data) != {field.name for field in fields(Identity)}:
        raise BadFile("identity")
    for field in fields(Identity):
        wanted = int if field.type == "int" else str
        if type(data[field.name]) is not wanted:
            raise BadFile("identity")
    identity = Identity(**data)
    if identity.page < 1 or identity.page_bytes < 1 or identity.page_bytes % identity.page:
        raise BadFile("identity")
    return identity


def _check(manifest: Manifest) -> None:
    """The rules between the parts of a manifest."""
    identity = manifest.identity
    if len(manifest.ids) % 4 or manifest.logits.n_bytes % 4:
        raise BadFile("header")
    if sum(part.count for part in manifest.parts) != manifest.n_pages:
        raise BadFile("header")
    if manifest.tail.n_bytes != manifest.tail_tokens * (identity.page_bytes // identity.page):
        raise BadFile("header")


# --------------------------------------------------------------------------------------------------
# The frame


def _frame(magic: bytes, header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    framed = _FRAME.pack(magic, FORMAT_VERSION, len(text)) + text
    return framed + _CRC.pack(zlib.crc32(framed))


def _read_frame(read: Read, magic: bytes) -> tuple[dict[str, Any], int]:
    """The header, and the offset of what follows."""
    start = read(0, _FRAME.size)
    if len(start) < _FRAME.size:
        raise BadFile("cut")
    found, version, n = _FRAME.unpack(start)
    if found != magic:
        raise BadFile("magic")
    if version != FORMAT_VERSION:
        raise BadFile("version")
    if n > _LONGEST_HEADER:
        raise BadFile("header")
    text = read(_FRAME.size, n + _CRC.size)
    if len(text) < n + _CRC.size:
        raise BadFile("cut")
    if _CRC.unpack(text[n:])[0] != zlib.crc32(start + text[:n]):
        raise BadFile("header_checksum")
    try:
        header = json.loads(text[:n])
    except (ValueError, RecursionError):
        raise BadFile("header") from None
    if not isinstance(header, dict):
        raise BadFile("header")
    return header, _FRAME.size + n + _CRC.size


def _count(header: Mapping[str, Any], name: str) -> int:
    value = header.get(name)
    if type(value) is not int or value < 1:
        raise BadFile("header")
    return value


def _list(header: Mapping[str, Any], name: str) -> list[Any]:
    value = header.get(name)
    if not isinstance(value, list):
        raise BadFile("header")
    return value


def is_hash(text: str) -> bool:
    """Whether a text is a hash as it stands in file names."""
    return len(text) == 2 * HASH_BYTES and not set(text) - set("0123456789abcdef")
