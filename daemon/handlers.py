"""One handler per verb: what the front does with a command.

Commands of `AT_ONCE` are answered on the spot, whatever runs; those of `IN_TURN` become open requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slotd.daemon.door import admit_file, admit_prompt, admit_slot
from slotd.daemon.front import Front
from slotd.daemon.open_requests import OpenRequest
from slotd.protocol.errors import RequestError
from slotd.protocol.messages import (
    Cancel,
    Cancelled,
    Command,
    Done,
    Drop,
    FreeDrafter,
    FreeSnapshot,
    Generate,
    Hello,
    Json,
    ListSlots,
    LoadSnapshot,
    Park,
    Prompt,
    Props,
    Restore,
    RestoreChain,
    Snapshot,
    SnapshotThin,
    Status,
    Stored,
    Unpark,
    Unsupported,
)

# ----- answered at once


def hello(front: Front, command: Command) -> None:
    """HELLO: what this daemon is; the connection speaks version 2 from here on."""
    _report(front, "hello", {**front.props, "epoch": front.epoch}, command.id)


def props(front: Front, command: Command) -> None:
    """PROPS: as HELLO, without its effect."""
    _report(front, "props", {**front.props, "epoch": front.epoch}, command.id)


def status(front: Front, command: Command) -> None:
    """STATUS: what runs now."""
    _report(front, "status", front.status(), command.id)


def cancel(front: Front, command: Command) -> None:
    """CANCEL: the end of another request; its answer is its own terminal line."""
    front.put(Cancelled(id=command.id, found=front.cancel(command.id)))


def _report(front: Front, kind: str, data: dict[str, Any], request_id: str | None) -> None:
    if request_id is not None and front.requests.get(request_id) is not None:
        raise RequestError("duplicate_id", id=request_id)
    front.put(Json(kind=kind, data=data, id=request_id))
    if request_id is not None or front.version_2:
        front.put(Done(id=request_id, status="ok", fields={"epoch": front.epoch}))


# ----- open requests


def prompt(front: Front, request: OpenRequest) -> None:
    """A bare prompt, RESTORE or RESTORE_CHAIN."""
    command = request.command
    assert isinstance(command, Prompt)
    if request.id is None and front.stream is None:
        raise RequestError("no_stream_fd")
    if request.id is None and front.stream == "fd" and command.logprobs:
        raise RequestError("bad_args", {"field": "logprobs", "reason": "the token stream carries ids only"})
    front.submit(request, command, admit_prompt(command, front.limits))


def generate(front: Front, request: OpenRequest) -> None:
    """generate IN N OUT: the engine side sees a prompt, the front writes the file."""
    assert isinstance(request.command, Generate)
    front.submit(request, *admit_file(request.command, front.limits))


def slot_command(front: Front, request: OpenRequest) -> None:
    """Every other verb about slots and weights: the engine side answers."""
    admit_slot(request.command, front.limits)
    front.submit(request, request.command)


def unsupported(front: Front, request: OpenRequest) -> None:
    """A verb of the source that this build does not have."""
    assert isinstance(request.command, Unsupported)
    raise RequestError("unsupported", {"verb": request.command.name})


AT_ONCE: dict[type[Command], Callable[[Front, Command], None]] = {
    Hello: hello,
    Props: props,
    Status: status,
    Cancel: cancel,
}

IN_TURN: dict[type[Command], Callable[[Front, OpenRequest], None]] = {
    Prompt: prompt,
    Restore: prompt,
    RestoreChain: prompt,
    Generate: generate,
    Snapshot: slot_command,
    SnapshotThin: slot_command,
    Stored: slot_command,
    LoadSnapshot: slot_command,
    Drop: slot_command,
    FreeSnapshot: slot_command,
    ListSlots: slot_command,
    Park: slot_command,
    Unpark: slot_command,
    FreeDrafter: slot_command,
    Unsupported: unsupported,
}
