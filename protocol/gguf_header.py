"""The header of a GGUF file: metadata and tensor table, read from a buffer.

Layout (all little-endian; the GGUF specification, versions 2 and 3)::

    magic "GGUF", version u32, tensor count u64, key count u64
    per key      name string, value type u32, value
    per tensor   name string, dimension count u32, dimensions u64 (innermost first), type u32, offset u64
    padding up to the alignment, then the tensor data; offsets count from there
    string       length u64, UTF-8 bytes
    array        element type u32, count u64, elements

The file is not trusted: every length is compared with what the buffer still holds before anything is
allocated, and every fault is a `ModelError` that names the file, the key or tensor, and the limit.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from slotd.protocol.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"

#: Limits of the GGUF specification.
MAX_KEY_BYTES = 65_535
MAX_TENSOR_NAME_BYTES = 64
MAX_DIMENSIONS = 4
MAX_ELEMENTS = 2**63 - 1

MetadataValue: TypeAlias = "bool | int | float | str | list[str] | list[bool] | array[int] | array[float]"

_Buffer = Any  # bytes, bytearray, memoryview or mmap: anything memoryview() takes
_T = TypeVar("_T")

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

#: Value type -> (name, struct of one value, array typecode). Bools, strings and arrays are apart.
_NUMBERS: Mapping[int, tuple[str, struct.Struct, str]] = {
    0: ("uint8", struct.Struct("<B"), "B"),
    1: ("int8", struct.Struct("<b"), "b"),
    2: ("uint16", struct.Struct("<H"), "H"),
    3: ("int16", struct.Struct("<h"), "h"),
    4: ("uint32", _U32, "I"),
    5: ("int32", struct.Struct("<i"), "i"),
    6: ("float32", struct.Struct("<f"), "f"),
    10: ("uint64", _U64, "Q"),
    11: ("int64", struct.Struct("<q"), "q"),
    12: ("float64", struct.Struct("<d"), "d"),
}
_BOOL, _STRING, _ARRAY = 7, 8, 9

# The smallest a key (empty name, one-byte value) and a tensor (empty name, one dimension) can be.
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One line of the tensor table.

    Attributes:
        name: e.g. ``blk.0.attn_q.weight``.
        type_id: ggml type number, unchecked here.
        shape: ggml order, the contiguous dimension first: a linear weight is (n_in, n_out).
        offset: bytes from `Header.data_start`, a multiple of the alignment.
    """

    name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int

    @property
    def n_elements(self) -> int:
        """Product of the dimensions; below 2**63."""
        product = 1
        for dimension in self.shape:
            product *= dimension
        return product


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before the tensor data.

    Attributes:
        name: the file's name, for messages.
        version: 2 or 3.
        metadata: key -> value, in file order. Number arrays are `array.array`, string and bool arrays lists.
        tensors: tensor name -> its line, in file order.
        alignment: bytes, a power of two.
        data_start: offset in the file at which tensor data begins.
    """

    name: str
    version: int
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, TensorInfo]
    alignment: int
    data_start: int

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer value. Raises ModelError: absent without default, or of another type."""
        return self._typed(key, default, "an integer", _as_integer)

    def number(self, key: str, default: float | None = None) -> float:
        """An integer or float value as float. Raises ModelError as `integer`."""
        return self._typed(key, default, "a number", _as_number)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """A bool value. Raises ModelError as `integer`."""
        return self._typed(key, default, "a bool", lambda value: value if isinstance(value, bool) else None)

    def string(self, key: str, default: str | None = None) -> str:
        """A string value. Raises ModelError as `integer`."""
        return self._typed(key, default, "a string", lambda value: value if isinstance(value, str) else None)

    def strings(self, key: str, default: list[str] | None = None) -> list[str]:
        """An array of strings. Raises ModelError as `integer`."""
        return self._typed(key, default, "an array of strings", _as_strings)

    def integers(self, key: str, default: list[int] | None = None) -> list[int]:
        """An array of integers of any width. Raises ModelError as `integer`."""
        return self._typed(key, default, "an array of integers", _as_integers)

    def _typed(
        self, key: str, default: _T | None, kind: str, convert: Callable[[MetadataValue], _T | None]
    ) -> _T:
        value = self.metadata.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self.name}: key {key} is missing")
            return default
        converted = convert(value)
        if converted is None:
            raise ModelError(f"{self.name}: key {key} must be {kind}, it is {_kind_of(value)}")
        return converted


def parse_header(buffer: _Buffer, name: str) -> Header:
    """Parse the header at the start of `buffer` (the whole file, usually a memory map).

    Args:
        buffer: any bytes-like object; nothing of it is kept.
        name: the file's name, for messages.

    Raises:
        ModelError: not a GGUF file, an unsupported version, truncated, or a malformed key or tensor.
    """
    with memoryview(buffer) as whole, whole.cast("B") as view:
        cursor = _Cursor(view, name)
        version = _read_magic_and_version(cursor)
        n_tensors = cursor.count(_MIN_TENSOR_BYTES, "tensor count")
        n_keys = cursor.count(_MIN_KEY_BYTES, "key count")
        metadata = _read_metadata(cursor, n_keys)
        alignment = _alignment(metadata, name)
        tensors = _read_tensors(cursor, n_tensors, alignment)
        data_start = -(-cursor.position // alignment) * alignment
        if tensors and data_start > cursor.size:
            raise ModelError(
                f"{name}: truncated: tensor data starts at byte {data_start}, the file has {cursor.size}"
            )
    return Header(name, version, metadata, tensors, alignment, data_start)


# ----- reading


class _Cursor:
    """A position in the file's bytes; every read is checked against their end."""

    __slots__ = ("name", "position", "size", "view")

    def __init__(self, view: memoryview, name: str) -> None:
        self.view = view
        self.name = name
        self.size = len(view)
        self.position = 0

    def take(self, n_bytes: int, what: str) -> int:
        """Step over n_bytes; returns where they start."""
        start = self.position
        if n_bytes > self.size - start:
            raise ModelError(
                f"{self.name}: truncated: {what} needs {n_bytes} bytes at byte {start}, "
                f"the file has {self.size}"
            )
        self.position = start + n_bytes
        return start

    def unpack(self, layout: struct.Struct, what: str) -> Any:
        return layout.unpack_from(self.view, self.take(layout.size, what))[0]

    def count(self, element_bytes: int, what: str) -> int:
        """A u64 count of elements that take at least element_bytes each."""
        count: int = self.unpack(_U64, what)
        limit = (self.size - self.position) // element_bytes
        if count > limit:
            raise ModelError(
                f"{self.name}: {what} is {count}, the rest of the file holds at most {limit} (truncated?)"
            )
        return count

    def string(self, what: str) -> str:
        length: int = self.unpack(_U64, what)
        start = self.take(length, what)
        try:
            return str(self.view[start : start + length], "utf-8")
        except UnicodeDecodeError:
            raise ModelError(f"{self.name}: {what} is not UTF-8 (string at byte {start})") from None

    def identifier(self, what: str, limit: int) -> str:
        """The name of a key or tensor: 1 to limit bytes, printable, so that messages can show it."""
        text = self.string(what)
        if not 1 <= len(text.encode()) <= limit:
            raise ModelError(f"{self.name}: {what} has {len(text.encode())} bytes, the limit is 1 to {limit}")
        if not text.isprintable():
            raise ModelError(f"{self.name}: {what} has unprintable characters: {_shown(text)}")
        return text


def _read_magic_and_version(cursor: _Cursor) -> int:
    start = cursor.take(4, "magic")
    magic = bytes(cursor.view[start : start + 4])
    if magic != MAGIC:
        raise ModelError(f"{cursor.name}: not a GGUF file (it starts with {magic!r}, not {MAGIC!r})")
    version: int = cursor.unpack(_U32, "version")
    if version and version & 0xFFFF == 0:
        raise ModelError(f"{cursor.name}: big-endian GGUF is not supported, only little-endian")
    if version not in VERSIONS:
        supported = " and ".join(map(str, VERSIONS))
        raise ModelError(f"{cursor.name}: GGUF version {version} is not supported, only {supported}")
    return version


def _read_metadata(cursor: _Cursor, n_keys: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for index in range(n_keys):
        key = cursor.identifier(f"name of key {index}", MAX_KEY_BYTES)
        what = f"key {_shown(key)}"
        if key in metadata:
            raise ModelError(f"{cursor.name}: {what} stands there twice")
        metadata[key] = _read_value(cursor, cursor.unpack(_U32, what), what)
    return metadata


def _read_value(cursor: _Cursor, value_type: int, what: str) -> MetadataValue:
    if value_type in _NUMBERS:
        number: int | float = cursor.unpack(_NUMBERS[value_type][1], what)
        return number
    if value_type == _STRING:
        return cursor.string(what)
    if value_type == _BOOL:
        return _read_bools(cursor, 1, what)[0]
    if value_type == _ARRAY:
        return _read_array(cursor, what)
    raise ModelError(f"{cursor.name}: {what} has unknown value type {value_type}, the types are 0 to 12")


def _read_array(cursor: _Cursor, what: str) -> MetadataValue:
    element_type: int = cursor.unpack(_U32, what)
    count_of = f"{what}: element count"
    if element_type in _NUMBERS:
        typecode = _NUMBERS[element_type][2]
        numbers: array[Any] = array(typecode)
        n_bytes = numbers.itemsize * cursor.count(numbers.itemsize, count_of)
        start = cursor.take(n_bytes, what)
        numbers.frombytes(cursor.view[start : start + n_bytes])
        return numbers
    if element_type == _STRING:
        return _read_strings(cursor, cursor.count(_U64.size, count_of), what)
    if element_type == _BOOL:
        return _read_bools(cursor, cursor.count(1, count_of), what)
    if element_type == _ARRAY:
        raise ModelError(f"{cursor.name}: {what} is an array of arrays, which is not supported")
    raise ModelError(
        f"{cursor.name}: {what} has unknown array element type {element_type}, the types are 0 to 12"
    )


def _read_bools(cursor: _Cursor, count: int, what: str) -> list[bool]:
    start = cursor.take(count, what)
    values = bytes(cursor.view[start : start + count])
    if values.strip(b"\0\1"):
        raise ModelError(f"{cursor.name}: {what} is a bool that is neither 0 nor 1")
    return [value == 1 for value in values]


def _read_strings(cursor: _Cursor, count: int, what: str) -> list[str]:
    # The hot loop of the parser (a vocabulary and its merges are 100K strings and more): no calls into
    # the cursor, one check per string.
    view, size, position = cursor.view, cursor.size, cursor.position
    length_at = _U64.unpack_from
    strings: list[str] = []
    append = strings.append
    try:
        for _ in range(count):
            end = position + 8 + length_at(view, position)[0]
            if end > size:
                break
            append(str(view[position + 8 : end], "utf-8"))
            position = end
    except struct.error:
        pass  # not even a length is left: reported below
    except UnicodeDecodeError:
        raise ModelError(f"{cursor.name}: {what}[{len(strings)}] is not UTF-8") from None
    if len(strings) < count:
        raise ModelError(
            f"{cursor.name}: truncated: {what}[{len(strings)}] of {count} reaches beyond "
            f"the file's {size} bytes"
        )
    cursor.position = position
    return strings


def _alignment(metadata: Mapping[str, MetadataValue], name: str) -> int:
    value = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    alignment = _as_integer(value) or 0
    if not 0 < alignment < 2**31 or alignment & (alignment - 1):
        raise ModelError(
            f"{name}: key {ALIGNMENT_KEY} is {_shown(value)}, the limit is a power of two below 2**31"
        )
    return alignment


def _read_tensors(cursor: _Cursor, n_tensors: int, alignment: int) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for index in range(n_tensors):
        info = _read_tensor(cursor, index, alignment)
        if info.name in tensors:
            raise ModelError(f"{cursor.name}: tensor {info.name} stands there twice")
        tensors[info.name] = info
    return tensors


def _read_tensor(cursor: _Cursor, index: int, alignment: int) -> TensorInfo:
    name = cursor.identifier(f"name of tensor {index}", MAX_TENSOR_NAME_BYTES)
    what = f"tensor {name}"
    n_dimensions: int = cursor.unpack(_U32, what)
    if not 1 <= n_dimensions <= MAX_DIMENSIONS:
        raise ModelError(
            f"{cursor.name}: {what} has {n_dimensions} dimensions, the limit is 1 to {MAX_DIMENSIONS}"
        )
    shape: tuple[int, ...] = tuple(cursor.unpack(_U64, what) for _ in range(n_dimensions))
    info = TensorInfo(name, cursor.unpack(_U32, what), shape, cursor.unpack(_U64, what))
    if 0 in shape:
        raise ModelError(f"{cursor.name}: {what} has a dimension of 0: {list(shape)}")
    if info.n_elements > MAX_ELEMENTS:
        raise ModelError(
            f"{cursor.name}: {what} has dimensions {list(shape)}: more than {MAX_ELEMENTS} elements"
        )
    if info.offset % alignment:
        raise ModelError(
            f"{cursor.name}: {what} starts at data offset {info.offset}, not a multiple of {alignment}"
        )
    return info


# ----- values


def _as_integer(value: MetadataValue) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _as_number(value: MetadataValue) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _as_strings(value: MetadataValue) -> list[str] | None:
    # An empty array passes whatever its element type was: it holds nothing of a wrong type.
    if isinstance(value, list | array) and all(isinstance(item, str) for item in value):
        return [str(item) for item in value]
    return None


def _as_integers(value: MetadataValue) -> list[int] | None:
    if isinstance(value, array) and value.typecode not in "fd":
        return [int(item) for item in value]
    return [] if isinstance(value, list) and not value else None


def _kind_of(value: MetadataValue) -> str:
    if isinstance(value, array):
        return "an array of " + ("floats" if value.typecode in "fd" else "integers")
    if isinstance(value, list):
        return f"an array of {type(value[0]).__name__}s" if value else "an empty array"
    return f"a {type(value).__name__}: {_shown(value)}"


def _shown(value: object) -> str:
    """A value from the file for a message: short, on one line, nothing a terminal would obey."""
    text = value if isinstance(value, str) else str(value)
    text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= 80 else text[:77] + "..."
