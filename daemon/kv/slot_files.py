"""Files of stored snapshots: the frame that all have, and manifests. Pure functions: bytes in, bytes out.

A **page file** holds K/V and the ids they are of, in pieces (`page_files`). A **manifest** is one snapshot:
which pieces of which page files it consists of, and the logits that follow. A longer prefix names the pieces
of the shorter one and adds a page file with the tokens that are new, so nothing is written twice: neither K/V
nor ids, not even those of a page that was not full.

A model with recurrent layers has their state in the manifest too, the last of its sections.

Both start with the same frame::

    8 bytes   magic, one for each kind
    uint32    format version
    uint32    n, length of the header
    n bytes   header, JSON in UTF-8
    uint32    CRC-32 of everything above

and go on with the sections that the header names. Numbers are little-endian. Every byte of a file is covered
by a checksum: of the frame, of the table, of each piece, or of its section.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from slotd.protocol.slot_identity import HASH_BYTES

#: Of all files but manifests with a state, which a reader of this version could not make anything of.
FORMAT_VERSION = 2
STATE_VERSION = 3
MANIFEST_MAGIC = b"slotdSNP"

_FRAME = struct.Struct("<8sII")
_CRC = struct.Struct("<I")
_PART = struct.Struct(f"<{HASH_BYTES}sII")

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
        math: what computed them and how, as in numpy-exact.
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

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.page_bytes // self.page


@dataclass(frozen=True, slots=True)
class Part:
    """`count` pieces of page file `name`, from piece `first` on."""

    name: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Section:
    """Some bytes of a manifest file: where they are, and their CRC-32."""

    start: int
    n_bytes: int
    crc: int


#: A section that is not there.
NOTHING = Section(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes of a large section, with their CRC-32."""

    data: bytes | memoryview
    crc: int

    @classmethod
    def of(cls, data: bytes | memoryview) -> Blob:
        """These bytes, which do not change any more."""
        return cls(data, zlib.crc32(data))


@dataclass(frozen=True, slots=True)
class Manifest:
    """The head of a manifest file.

    Attributes:
        identity: what it has to be loaded with.
        ids: int32 little-endian bytes of the ids it covers; they lie in its page files.
        parts: where its K/V are, in order.
        logits: float32 little-endian logits that follow, or no bytes.
        file_bytes: length of the file.
        state: of the recurrent layers, or no bytes.
    """

    identity: Identity
    ids: bytes
    parts: tuple[Part, ...]
    logits: Section
    file_bytes: int
    state: Section = NOTHING

    @property
    def length(self) -> int:
        """Tokens it covers."""
        return len(self.ids) // 4


# --------------------------------------------------------------------------------------------------
# Manifests


def encode_manifest(
    identity: Identity, length: int, parts: tuple[Part, ...], logits: bytes, state: Blob | None = None
) -> bytes:
    """A whole manifest file of a snapshot with so many tokens, but for its state: that goes right behind."""
    packed = b"".join(_PART.pack(bytes.fromhex(part.name), part.first, part.count) for part in parts)
    sections = {"parts": packed, "logits": logits}
    listed = [[name, len(data), zlib.crc32(data)] for name, data in sections.items()]
    if state is not None:
        listed.append(["state", len(state.data), state.crc])
    header = {"identity": asdict(identity), "length": length, "sections": listed}
    version = FORMAT_VERSION if state is None else STATE_VERSION
    return encode_frame(MANIFEST_MAGIC, header, version) + b"".join(sections.values())


def decode_manifest(read: Read, file_bytes: int, ids_of: Callable[[Part], bytes]) -> Manifest:
    """The head of a manifest file, checked against the file's length and against itself.

    ids_of: the ids of a part; raises BadFile when there is no such part.

    Raises:
        BadFile: it is not one, is cut, or is damaged. `logits` and `state` are not looked at.
    """
    header, start, version = read_versioned_frame(read, MANIFEST_MAGIC, (FORMAT_VERSION, STATE_VERSION))
    sections = dict(_sections(header, start))
    names = ["parts", "logits"] if version == FORMAT_VERSION else ["parts", "logits", "state"]
    if list(sections) != names or sections["logits"].n_bytes % 4:
        raise BadFile("header")
    state = sections.get("state", NOTHING)
    if version == STATE_VERSION and (not state.n_bytes or state.n_bytes % 4):
        raise BadFile("header")
    if start + sum(section.n_bytes for section in sections.values()) != file_bytes:
        raise BadFile("length")
    identity = _identity(header.get("identity"))
    parts = tuple(_parts(read_section(read, sections["parts"], "parts")))
    ids = b"".join(map(ids_of, parts))
    if len(ids) != 4 * count_in(header, "length", least=0):
        raise BadFile("header")
    return Manifest(identity, ids, parts, sections["logits"], file_bytes, state)


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
    entries = header.get("sections")
    if not isinstance(entries, list):
        raise BadFile("header")
    for entry in entries:
        match entry:
            case [str(name), int(n_bytes), int(crc)] if n_bytes >= 0 and 0 <= crc < 1 << 32:
                yield name, Section(start, n_bytes, crc)
                start += n_bytes
            case _:
                raise BadFile("header")


def _parts(packed: bytes) -> Iterator[Part]:
    if len(packed) % _PART.size:
        raise BadFile("parts")
    for name, first, count in _PART.iter_unpack(packed):
        if not count:
            raise BadFile("parts")
        yield Part(name.hex(), first, count)


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


# --------------------------------------------------------------------------------------------------
# The frame


def encode_frame(magic: bytes, header: Mapping[str, Any], version: int = FORMAT_VERSION) -> bytes:
    """The frame around a header."""
    text = json.dumps(header, separators=(",", ":")).encode()
    framed = _FRAME.pack(magic, version, len(text)) + text
    return framed + _CRC.pack(zlib.crc32(framed))


def read_frame(read: Read, magic: bytes) -> tuple[dict[str, Any], int]:
    """The header, and the offset of what follows.

    Raises:
        BadFile: there is none of this kind, or it is cut or damaged.
    """
    header, end, _ = read_versioned_frame(read, magic, (FORMAT_VERSION,))
    return header, end


def read_versioned_frame(
    read: Read, magic: bytes, versions: tuple[int, ...]
) -> tuple[dict[str, Any], int, int]:
    """As `read_frame`, of one of these versions: the header, the offset of what follows, the version."""
    start = read(0, _FRAME.size)
    if len(start) < _FRAME.size:
        raise BadFile("cut")
    found, version, n = _FRAME.unpack(start)
    if found != magic:
        raise BadFile("magic")
    if version not in versions:
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
    return header, _FRAME.size + n + _CRC.size, version


def count_in(header: Mapping[str, Any], name: str, least: int = 1) -> int:
    """An integer of a header.

    Raises:
        BadFile: it is none, or below `least`.
    """
    value = header.get(name)
    if type(value) is not int or value < least:
        raise BadFile("header")
    return value
