"""Hashes of model files: a short one of samples that is there at once, and one of the whole file."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

from slotd.protocol.gguf_header import Header

DIGEST_BYTES = 16
SAMPLE_BYTES = 4096
EVEN_SAMPLES = 64
PIECE_BYTES = 8 << 20


def model_identity(data: mmap.mmap, header: Header) -> str:
    """Hash of header and tensor table (all of it), file length, and samples of the tensor data.

    A sample from the middle of every tensor notices one that was trained or quantised differently;
    evenly spaced ones notice a change of the file as a whole. A change of single bytes elsewhere is not
    noticed: what must survive that (slots on disk) hashes the whole file.

    Returns:
        32 hexadecimal digits.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"slotd-model")
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data[: header.data_start])
    for start in _sample_starts(len(data), header):
        digest.update(data[start : start + SAMPLE_BYTES])
    return digest.hexdigest()


def content_hash(path: Path, check_stop: Callable[[], None]) -> str:
    """Hash of a whole file.

    Args:
        check_stop: called after each piece; may raise.

    Returns:
        32 hexadecimal digits.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"slotd-content")
    with open(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            check_stop()
    return digest.hexdigest()


def _sample_starts(n_bytes: int, header: Header) -> Iterator[int]:
    """Byte offsets in the file, the same for every file with this header and length."""
    starts = sorted(header.data_start + info.offset for info in header.tensors.values())
    for start, end in zip(starts, starts[1:] + [n_bytes], strict=True):
        yield max(start, (start + end - SAMPLE_BYTES) // 2)
    span = max(n_bytes - SAMPLE_BYTES - header.data_start, 0)
    for index in range(EVEN_SAMPLES):
        yield header.data_start + span * index // (EVEN_SAMPLES - 1)


def file_stamp(path: Path) -> tuple[int, int, int]:
    """Size, time of the last change in ns, inode: another one may be another file. Zeros: there is none."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0
    return found.st_size, found.st_mtime_ns, found.st_ino
