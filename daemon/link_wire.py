"""The messages of `link` as frames of bytes, for an engine side in a process of its own.

A frame is the length of its header, the length of its ids (both uint32, little-endian), a JSON header, and
token ids as int32. Commands and events travel in the line form that the protocol gives them. Both ends are
of one build, so a frame that cannot be read is a fault of ours.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from slotd.daemon.link import (
    Emit,
    Failed,
    Finished,
    Flags,
    Line,
    Opened,
    Ping,
    Progress,
    Started,
    State,
    Stop,
    Submit,
    ToEngine,
    ToFront,
)
from slotd.protocol.messages import Prompt, TokenLogprob
from slotd.protocol.wire import format_command, format_event, parse_command, parse_event

LENGTHS = struct.Struct("<II")

assert sys.byteorder == "little", "ids are sent as they lie in memory"

#: Messages whose header is their fields as they are.
PLAIN: dict[str, type[Any]] = {
    "opened": Opened, "failed": Failed, "started": Started, "progress": Progress, "finished": Finished,
    "ping": Ping, "stop": Stop,
}  # fmt: skip
NAMES = {kind: name for name, kind in PLAIN.items()}

#: The prompt travels as ids behind the header; its line only has to be whole.
STAND_IN = (0,)


def frame(header: Mapping[str, Any], ids: bytes = b"") -> bytes:
    """One frame."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join((LENGTHS.pack(len(text), len(ids)), text, ids))


class Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """The frames that `data` completes: header and ids of each."""
        self._data += data
        while len(self._data) >= LENGTHS.size:
            n_text, n_ids = LENGTHS.unpack_from(self._data)
            end = LENGTHS.size + n_text + n_ids
            if len(self._data) < end:
                return
            text, ids = self._data[LENGTHS.size : end - n_ids], bytes(self._data[end - n_ids : end])
            del self._data[:end]
            yield json.loads(text), ids


# ----- front -> engine


def encode_to_engine(message: ToEngine | Ping, flag: int = 0) -> bytes:
    """A message for the engine side; `flag`: where the flags of a Submit are."""
    if not isinstance(message, Submit):
        return frame({"m": NAMES[type(message)]})
    command, ids = message.command, message.ids
    if isinstance(command, Prompt):
        command = dataclasses.replace(command, path=None, ids=STAND_IN)
    header = {
        "m": "submit", "key": message.key, "command": format_command(command), "flag": flag,
        "at": message.submitted_at, "ids": ids is not None,
    }  # fmt: skip
    return frame(header, b"" if ids is None else np.ascontiguousarray(ids, np.int32).tobytes())


def decode_to_engine(
    header: Mapping[str, Any], ids: bytes, flags_at: Callable[[int], Flags]
) -> ToEngine | Ping:
    """What a frame of the front says; `flags_at` finds the flags of a request."""
    if header["m"] != "submit":
        message: ToEngine | Ping = PLAIN[header["m"]]()
        return message
    command = parse_command(header["command"])
    if isinstance(command, Prompt):
        command = dataclasses.replace(command, ids=None)
    prompt = np.frombuffer(ids, np.int32) if header["ids"] else None
    return Submit(header["key"], command, flags_at(header["flag"]), header["at"], prompt)


# ----- engine -> front


def encode_to_front(message: ToFront) -> bytes:
    """A message for the front; State has another way."""
    match message:
        case Emit(key=key, at=at, ids=ids, logprobs=scores):
            header: dict[str, Any] = {"m": "emit", "key": key, "at": at}
            if scores:
                header["logprobs"] = [[score.logprob, score.top] for score in scores]
            return frame(header, np.asarray(ids, np.int32).tobytes())
        case Line(event=event, key=key):
            return frame({"m": "line", "key": key, "event": format_event(event)})
        case State():
            raise TypeError("State does not travel as a frame")
        case _:
            fields = {name: getattr(message, name) for name in message.__slots__}
            return frame({"m": NAMES[type(message)], **fields})


def decode_to_front(header: dict[str, Any], ids: bytes) -> ToFront:
    """What a frame of the engine side says."""
    kind = header.pop("m")
    if kind == "emit":
        scores = tuple(
            TokenLogprob(logprob, tuple((token, value) for token, value in top))
            for logprob, top in header.get("logprobs", ())
        )
        return Emit(header["key"], header["at"], tuple(np.frombuffer(ids, np.int32).tolist()), scores)
    if kind == "line":
        return Line(parse_event(header["event"]), header["key"])
    message: ToFront = PLAIN[kind](**header)
    return message
