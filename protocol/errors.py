"""Every error that crosses a border of slotd, as a tree.

    SlotdError
    ├── ProtocolError
    │   ├── LocalProtocolError    our bug: a message that cannot be put on the wire
    │   └── RemoteProtocolError   their bug: a daemon line that breaks the grammar
    ├── RequestError              one command was refused or failed; carries its wire code
    ├── ModelError                a model file cannot be used; names file, key or tensor, limit
    ├── ConfigError               a flag, variable or argument is wrong
    └── DaemonError               the daemon process, seen from a client
        ├── DaemonStartError      it did not become ready
        ├── DaemonDiedError       it ended while something waited for it
        └── DaemonTimeoutError    a bounded wait ran out

A `RequestError` is the only one with a wire form: ``err CODE key=value ...`` (or ``[done] status=err
code=CODE key=value ...``). The client rebuilds the same class from that line.
"""

from __future__ import annotations

from collections.abc import Mapping

Value = str | int | float

#: Wire code -> what it means. PROTOCOL.md lists exactly these (a test compares them).
CODES: Mapping[str, str] = {
    "bad_args": "a field of the command is missing, malformed or out of range",
    "bad_chain": "the slots of a chain do not go on where the ones before them end",
    "bad_id": "the request id is not 1-64 characters of A-Za-z0-9._:-",
    "bad_slot": "the slot number is not below the number of slots, or the slot is of the wrong kind",
    "bad_snapshot": "the stored snapshot is damaged; its file was moved aside",
    "bad_token": "a token id of the prompt is not in the vocabulary",
    "bad_utf8": "the line is not UTF-8",
    "busy": "too many requests are queued",
    "cancelled": "the command was cancelled (only where version 1 has no other end for it)",
    "device_lost": "the engine died while the request ran",
    "duplicate_id": "a request with this id is still open",
    "empty_prompt": "the prompt has no tokens (missing, unreadable or empty file)",
    "empty_slot": "the slot holds nothing",
    "engine_down": "the engine died too often; the daemon says why and stays up",
    "internal": "a fault of slotd; the log has the traceback",
    "line_too_long": "the line is longer than --max-line",
    "no_slot_dir": "the daemon was started without --slot-dir",
    "no_stream_fd": "a request without an id needs --stream-fd",
    "nonfinite": "the model produced logits that are not finite",
    "nothing_to_snapshot": "no sequence is there to take a snapshot of",
    "oom": "out of device memory",
    "overflow": "prompt + n_gen is longer than the context",
    "prefix_mismatch": "the prompt does not start with the tokens of the slot",
    "prefix_shorter": "the prompt is shorter than the slot",
    "read_only_slot_dir": "the folder of stored snapshots cannot be written, or another daemon writes it",
    "shutting_down": "the daemon is ending and takes no more commands",
    "snapshot_too_large": "the snapshot alone is larger than --slot-bytes",
    "stalled": "the reader took nothing for --stall-timeout, or went away",
    "target_parked": "the target model is parked",
    "unknown_command": "the first word is not a verb",
    "unknown_snapshot": "no snapshot of this hash is stored",
    "unsupported": "a known verb or field that this build or the model does not have",
    "write_out": "the output file cannot be written",
    "write_snapshot": "the snapshot could not be written to disk",
    "wrong_snapshot": "the stored snapshot is of another model, K/V type, window or arithmetic",
}


class SlotdError(Exception):
    """Base of all errors a caller may want to catch."""


class ProtocolError(SlotdError):
    """The line protocol was broken. Raise one of the two subclasses."""


class LocalProtocolError(ProtocolError):
    """A message that cannot be put on the wire: a bug on this side."""


class RemoteProtocolError(ProtocolError):
    """A line of the other side that breaks the grammar."""


class RequestError(SlotdError):
    """One command was refused or failed.

    Args:
        code: one of `CODES`.
        fields: what names the thing and the limit, in wire order, e.g. ``prompt=70 n_gen=10 max_ctx=64``.
        id: the request id, when the command had a usable one.
        verb: the verb, when it could be read (lower layers decide by it whether a -1 is owed).
    """

    def __init__(
        self, code: str, fields: Mapping[str, Value] | None = None, *, id: str | None = None, verb: str = ""
    ) -> None:
        self.code = code
        self.fields: dict[str, Value] = dict(fields or {})
        self.id = id
        self.verb = verb
        super().__init__(code, self.fields)

    def __str__(self) -> str:
        details = " ".join(f"{key}={value}" for key, value in self.fields.items())
        meaning = CODES.get(self.code, "")
        return f"{self.code} {details}".rstrip() + (f" ({meaning})" if meaning else "")


class ModelError(SlotdError):
    """A model file cannot be used. The message names the file, the key or tensor, and the limit."""


class ConfigError(SlotdError):
    """A flag, environment variable or argument is wrong. The message names it and what is allowed."""


class DaemonError(SlotdError):
    """The daemon process, seen from a client."""


class DaemonStartError(DaemonError):
    """The daemon did not become ready; the message ends with its last words."""


class DaemonDiedError(DaemonError):
    """The daemon ended while something waited for it; the message has exit code and last words."""


class DaemonTimeoutError(DaemonError):
    """A bounded wait for the daemon ran out."""
