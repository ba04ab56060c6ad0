"""Token-id files of the protocol: raw little-endian int32, with or without a count in front."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slotd.protocol.errors import RequestError

Ids = npt.NDArray[np.int32]

#: A prompt file larger than this many ids is not read at all.
MAX_IDS = 1 << 26


def read_ids(path: str, *, counted: bool) -> Ids:
    """All ids of a file: int32 [n]. `counted`: a uint32 count stands first, and that many ids follow.

    Bytes behind the last whole id are ignored, as in the source.

    Raises:
        RequestError: empty_prompt with the path and the reason, bad_args when it is absurdly large.
    """
    try:
        # Never open what could block or never end: a pipe, a terminal, a device.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise RequestError("empty_prompt", {"path": path, "reason": "not a regular file"})
            if info.st_size > 4 * (MAX_IDS + 1):
                raise RequestError("bad_args", {"path": path, "ids": info.st_size // 4, "limit": MAX_IDS})
            data = file.read(4 * (MAX_IDS + 1))  # a size is no promise: /proc files have none
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RequestError("empty_prompt", {"path": path, "reason": reason}) from None
    ids = np.frombuffer(data, dtype="<i4", count=len(data) // 4).astype(np.int32)
    if counted:
        count = int(ids[:1].view(np.uint32)[0]) if len(ids) else 0
        if count > len(ids) - 1:
            reason = f"the count says {count}, the file holds {max(len(ids) - 1, 0)}"
            raise RequestError("empty_prompt", {"path": path, "reason": reason})
        ids = ids[1 : 1 + count]
    if not len(ids):
        raise RequestError("empty_prompt", {"path": path, "reason": "no ids"})
    return ids


def write_ids(path: str, ids: Sequence[int], *, counted: bool) -> None:
    """Write ids as little-endian int32, a uint32 count first when `counted`.

    Raises:
        RequestError: write_out with the path and the reason.
    """
    try:
        # Never open what could block: this runs between the steps of everybody's answers.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RequestError("write_out", {"path": path, "reason": "not a regular file"})
            if counted:
                file.write(np.asarray([len(ids)], dtype="<u4").tobytes())
            file.write(np.asarray(ids, dtype="<i4").tobytes())
    except (OSError, ValueError) as error:
        raise RequestError("write_out", {"path": path, "reason": str(error)}) from None
