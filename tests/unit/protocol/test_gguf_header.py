"""The header parser against hand-made bytes: every layout, every fault by name, cuts and flips."""

from __future__ import annotations

import mmap
import random
import struct
import time
import tracemalloc
from array import array
from pathlib import Path

import gguf
import numpy as np
import pytest

from slotd.protocol.errors import ModelError
from slotd.protocol.gguf_header import Header, TensorInfo, parse_header
from tests.fakes.tiny_gguf import write_tiny_llama

U8, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 5, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, value_type: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", value_type) + payload


def array_of(element_type: int, count: int, payload: bytes) -> bytes:
    return struct.pack("<IQ", element_type, count) + payload


def tensor(
    name: str | bytes = "a", shape: tuple[int, ...] = (4,), type_id: int = 0, offset: int = 0
) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_id, offset)


def whole(
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: bytes = b"\3\0\0\0",
    n_tensors: int | None = None,
    n_keys: int | None = None,
    data: bytes = b"\0" * 64,
) -> bytes:
    keys, tensors = keys or [], tensors or []
    counts = struct.pack(
        "<QQ",
        len(tensors) if n_tensors is None else n_tensors,
        len(keys) if n_keys is None else n_keys,
    )
    head = magic + version + counts + b"".join(keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


def parse(data: bytes) -> Header:
    return parse_header(data, "x.gguf")


def fault(data: bytes) -> str:
    with pytest.raises(ModelError) as caught:
        parse(data)
    message = str(caught.value)
    assert message.startswith("x.gguf: ")
    assert len(message) < 400
    assert message.isprintable()
    return message.removeprefix("x.gguf: ")


# ----- what is read


def test_every_scalar_type() -> None:
    layouts = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
    keys = [key(f"k{kind}", kind, struct.pack("<" + code, 7)) for kind, code in layouts.items()]
    keys += [key("yes", BOOL, b"\1"), key("no", BOOL, b"\0"), key("s", STRING, text("grüße"))]
    metadata = parse(whole(keys)).metadata
    assert metadata == {f"k{kind}": 7 for kind in layouts} | {"yes": True, "no": False, "s": "grüße"}
    assert type(metadata["k6"]) is float
    assert type(metadata["yes"]) is bool


def test_numbers_keep_sign_and_width() -> None:
    keys = [
        key("min", 11, struct.pack("<q", -(2**63))),
        key("max", 10, struct.pack("<Q", 2**64 - 1)),
        key("bytes", ARRAY, array_of(1, 2, b"\x80\x7f")),
        key("floats", ARRAY, array_of(F32, 2, struct.pack("<2f", 0.5, -2.0))),
    ]
    metadata = parse(whole(keys)).metadata
    assert metadata["min"] == -(2**63)
    assert metadata["max"] == 2**64 - 1
    assert metadata["bytes"] == array("b", [-128, 127])
    assert metadata["floats"] == array("f", [0.5, -2.0])


def test_string_and_bool_arrays() -> None:
    keys = [
        key("s", ARRAY, array_of(STRING, 3, text("a") + text("") + text("Ġb"))),
        key("b", ARRAY, array_of(BOOL, 2, b"\1\0")),
        key("none", ARRAY, array_of(STRING, 0, b"")),
        key("after", U32, struct.pack("<I", 9)),
    ]
    metadata = parse(whole(keys)).metadata
    assert metadata == {"s": ["a", "", "Ġb"], "b": [True, False], "none": [], "after": 9}


def test_tensor_table_and_data_start() -> None:
    data = whole(tensors=[tensor("a", (2, 3, 1, 1)), tensor("b.weight", (64,), 30, 32)])
    header = parse(data)
    assert header.tensors == {
        "a": TensorInfo("a", 0, (2, 3, 1, 1), 0),
        "b.weight": TensorInfo("b.weight", 30, (64,), 32),
    }
    assert header.tensors["a"].n_elements == 6
    assert (header.version, header.alignment) == (3, 32)
    assert header.data_start == len(data) - 64


def test_version_2_and_own_alignment() -> None:
    keys = [key("general.alignment", U32, struct.pack("<I", 8))]
    header = parse(whole(keys, [tensor(offset=8)], version=b"\2\0\0\0"))
    assert (header.version, header.alignment, header.data_start % 8) == (2, 8, 0)


def test_a_file_without_tensors_needs_no_padding() -> None:
    assert parse(b"GGUF" + struct.pack("<IQQ", 3, 0, 0)).tensors == {}


def test_memory_map_can_be_closed_afterwards(tiny_llama: Path) -> None:
    with tiny_llama.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = parse_header(data, "tiny")
    assert header.metadata["llama.block_count"] == 2


def test_equals_the_reader_of_the_gguf_package(tiny_llama: Path) -> None:
    header = parse(tiny_llama.read_bytes())
    reader = gguf.GGUFReader(tiny_llama)
    assert header.data_start == reader.data_offset
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    expected = {name: field.contents() for name, field in fields.items()}
    found = {
        name: list(value) if isinstance(value, array) else value for name, value in header.metadata.items()
    }
    assert found == expected
    assert {
        (info.name, info.type_id, info.shape, info.offset + header.data_start)
        for info in header.tensors.values()
    } == {(t.name, int(t.tensor_type), tuple(map(int, t.shape)), int(t.data_offset)) for t in reader.tensors}


@pytest.mark.model
def test_default_model_opens_fast(default_model: Path) -> None:
    with default_model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = time.process_time()
        header = parse_header(data, "default")
        seconds = time.process_time() - start
    assert len(header.strings("tokenizer.ggml.tokens")) == 49152
    assert len(header.tensors) == 272
    assert seconds < 0.5  # the target is half of it; GGUFReader takes seconds


# ----- typed access


def test_typed_access() -> None:
    keys = [
        key("n", U32, struct.pack("<I", 5)),
        key("f", F32, struct.pack("<f", 0.5)),
        key("b", BOOL, b"\1"),
        key("s", STRING, text("x")),
        key("strings", ARRAY, array_of(STRING, 1, text("x"))),
        key("integers", ARRAY, array_of(I32, 1, struct.pack("<i", -1))),
        key("floats", ARRAY, array_of(F32, 1, struct.pack("<f", 1))),
        key("empty", ARRAY, array_of(F32, 0, b"")),
    ]
    header = parse(whole(keys))
    assert header.integer("n") == 5
    assert header.number("n") == 5.0
    assert header.number("f") == 0.5
    assert header.flag("b") is True
    assert header.string("s") == "x"
    assert header.strings("strings") == ["x"]
    assert header.integers("integers") == [-1]
    assert header.strings("empty") == []
    assert header.integer("absent", 3) == 3
    assert header.flag("absent", False) is False
    for read, name, part in [
        (header.integer, "b", "must be an integer, it is a bool: True"),
        (header.integer, "f", "must be an integer, it is a float: 0.5"),
        (header.number, "s", "must be a number, it is a str: x"),
        (header.flag, "n", "must be a bool, it is a int: 5"),
        (header.string, "strings", "must be a string, it is an array of strs"),
        (header.strings, "integers", "must be an array of strings, it is an array of integers"),
        (header.integers, "floats", "must be an array of integers, it is an array of floats"),
        (header.integers, "absent", "is missing"),
    ]:
        with pytest.raises(ModelError, match=f"^x.gguf: key {name} {part}$"):
            read(name)


# ----- faults


def test_not_gguf() -> None:
    assert fault(whole(magic=b"GGML")) == "not a GGUF file (it starts with b'GGML', not b'GGUF')"
    assert fault(b"") == "truncated: magic needs 4 bytes at byte 0, the file has 0"


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (b"\0\0\0\3", "big-endian GGUF is not supported, only little-endian"),
        (b"\1\0\0\0", "GGUF version 1 is not supported, only 2 and 3"),
        (b"\4\0\0\0", "GGUF version 4 is not supported, only 2 and 3"),
        (b"\0\0\0\0", "GGUF version 0 is not supported, only 2 and 3"),
    ],
)
def test_versions(version: bytes, message: str) -> None:
    assert fault(whole(version=version)) == message


def test_absurd_counts() -> None:
    assert fault(whole(n_keys=2**60)).startswith(f"key count is {2**60}, the rest of the file holds at most ")
    assert fault(whole(n_tensors=2**63)).startswith(f"tensor count is {2**63}, the rest of the file")
    for kind in (U8, F32, BOOL, STRING, U64):
        message = fault(whole([key("k", ARRAY, array_of(kind, 2**61, b""))]))
        assert message.startswith(f"key k: element count is {2**61}, the rest of the file holds at most ")


def test_string_lengths() -> None:
    long = struct.pack("<Q", 2**62) + b"x"
    assert fault(whole([long])).startswith(f"truncated: name of key 0 needs {2**62} bytes at byte 32, ")
    assert fault(whole([key("k", STRING, long)])).startswith(f"truncated: key k needs {2**62} bytes")
    strings = array_of(STRING, 2, text("a") + long)
    assert fault(whole([key("k", ARRAY, strings)])).startswith("truncated: key k[1] of 2 reaches beyond")


def test_utf8() -> None:
    assert fault(whole([key(b"k\xff", U8, b"\0")])).startswith("name of key 0 is not UTF-8")
    assert fault(whole([key("k", STRING, text(b"\xc3"))])).startswith("key k is not UTF-8")
    strings = array_of(STRING, 2, text("a") + text(b"\x80"))
    assert fault(whole([key("k", ARRAY, strings)])) == "key k[1] is not UTF-8"
    assert fault(whole(tensors=[tensor(b"\xfe")])).startswith("name of tensor 0 is not UTF-8")


def test_names() -> None:
    assert fault(whole([key("", U8, b"\0")])) == "name of key 0 has 0 bytes, the limit is 1 to 65535"
    long = fault(whole([key("k" * 65536, U8, b"\0")]))
    assert long == "name of key 0 has 65536 bytes, the limit is 1 to 65535"
    assert fault(whole(tensors=[tensor("t" * 65)])) == "name of tensor 0 has 65 bytes, the limit is 1 to 64"
    assert fault(whole(tensors=[tensor("")])) == "name of tensor 0 has 0 bytes, the limit is 1 to 64"
    assert fault(whole([key("\x1b[2J", U8, b"\0")])) == "name of key 0 has unprintable characters: \\x1b[2J"
    twice = [key("k", U8, b"\0"), key("k", U8, b"\1")]
    assert fault(whole(twice)) == "key k stands there twice"
    assert fault(whole(tensors=[tensor("t"), tensor("t")])) == "tensor t stands there twice"


def test_types() -> None:
    assert fault(whole([key("k", 13, b"\0")])) == "key k has unknown value type 13, the types are 0 to 12"
    odd = key("k", ARRAY, array_of(99, 1, b"\0"))
    assert fault(whole([odd])) == "key k has unknown array element type 99, the types are 0 to 12"
    nested = key("k", ARRAY, array_of(ARRAY, 1, array_of(U8, 1, b"\0")))
    assert fault(whole([nested])) == "key k is an array of arrays, which is not supported"
    assert fault(whole([key("k", BOOL, b"\2")])) == "key k is a bool that is neither 0 nor 1"
    bools = key("k", ARRAY, array_of(BOOL, 2, b"\1\7"))
    assert fault(whole([bools])) == "key k is a bool that is neither 0 nor 1"


@pytest.mark.parametrize("value", [0, 3, 48, 2**31])
def test_alignment(value: int) -> None:
    keys = [key("general.alignment", U32, struct.pack("<I", value))]
    assert fault(whole(keys)) == f"key general.alignment is {value}, the limit is a power of two below 2**31"


def test_alignment_of_another_type() -> None:
    assert fault(whole([key("general.alignment", STRING, text("32"))])).startswith(
        "key general.alignment is 32, the limit"
    )


def test_dimensions() -> None:
    assert fault(whole(tensors=[tensor(shape=())])) == "tensor a has 0 dimensions, the limit is 1 to 4"
    assert fault(whole(tensors=[tensor(shape=(1,) * 5)])) == "tensor a has 5 dimensions, the limit is 1 to 4"
    assert fault(whole(tensors=[tensor(shape=(4, 0))])) == "tensor a has a dimension of 0: [4, 0]"
    for shape in ((2**42, 2**21), (2**63,), (2**32, 2**32, 2**32, 2**32)):  # the second wraps to 0 in 64 bits
        message = fault(whole(tensors=[tensor(shape=shape)]))
        assert message == f"tensor a has dimensions {list(shape)}: more than {2**63 - 1} elements"


def test_offsets() -> None:
    message = fault(whole(tensors=[tensor(offset=33)]))
    assert message == "tensor a starts at data offset 33, not a multiple of 32"
    head = whole(tensors=[tensor()], data=b"")
    assert parse(head).data_start == len(head)
    assert fault(head[:-1]).startswith(f"truncated: tensor data starts at byte {len(head)}, the file has ")


# ----- cuts and flips


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole header with a tokenizer, without tensor data."""
    path = write_tiny_llama(tmp_path_factory.mktemp("head") / "t.gguf", n_layer=1, n_vocab=270)
    data = path.read_bytes()
    return data[: parse(data).data_start]


def test_cut_at_every_byte_is_a_model_error(head: bytes) -> None:
    parse(head)
    for n_bytes in range(len(head)):
        with pytest.raises(ModelError, match=r"^x\.gguf: "):
            parse(head[:n_bytes])


def test_flips_are_a_model_error_or_a_header(head: bytes) -> None:
    rng = random.Random(5)
    failed = 0
    for _ in range(2000):
        data = bytearray(head)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        failed += not _parses(bytes(data))
    assert 0 < failed < 2000


@pytest.mark.parametrize("garbage", [b"\xff" * 8, b"\0" * 8, b"\0\0\0\0\0\0\0\x40", b"\xff\xff\xff\x7f"])
def test_overwritten_fields_never_allocate_beyond_the_file(head: bytes, garbage: bytes) -> None:
    tracemalloc.start()
    try:
        parse(head)
        _, honest = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for offset in range(4, len(head) - 8, 11):
            _parses(head[:offset] + garbage + head[offset + len(garbage) :])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < honest + 2 * len(head) + 100_000


def _parses(data: bytes) -> bool:
    try:
        parse(data)
    except ModelError:
        return False
    return True


def test_random_bytes_after_the_magic() -> None:
    rng = np.random.default_rng(3)
    for _ in range(300):
        assert not _parses(b"GGUF\3\0\0\0" + rng.bytes(200))
