"""What is checked of a prompt before it is accepted: the door of the daemon."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slotd.daemon.prompt_files import read_ids
from slotd.protocol.errors import RequestError
from slotd.protocol.messages import (
    Command,
    Drop,
    FreeSnapshot,
    Generate,
    LoadSnapshot,
    Prompt,
    Restore,
    RestoreChain,
    Snapshot,
    SnapshotThin,
    Stored,
)

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the door knows of the engine."""

    n_vocab: int
    max_ctx: int
    slots: int
    stored: bool = False  # whether there is a folder for snapshots on disk


def admit_prompt(command: Prompt, limits: Limits) -> Ids:
    """The prompt's ids, int32 [n], read and checked.

    Raises:
        RequestError: empty_prompt, bad_token, overflow, bad_slot, bad_args, no_slot_dir.
    """
    if isinstance(command, Restore):
        _check_slot(command.slot, limits)
    if isinstance(command, RestoreChain):
        for slot in (max(command.thick, 0), *command.thins):
            _check_slot(slot, limits)
    if command.tier == "disk" and not limits.stored:
        raise RequestError("no_slot_dir")
    if command.snap is not None:
        _check_slot(command.snap.slot, limits)
    _check_ids_of("stop", command.stop, limits)
    _check_ids_of("logit_bias", (token for token, _ in command.sampling.logit_bias), limits)
    if command.path is not None:
        ids = read_ids(command.path, counted=False)
    else:
        ids = np.array(command.ids if command.ids is not None else (), dtype=np.int32)
    if not len(ids):
        raise RequestError("empty_prompt", {"reason": "no ids"})
    _check_prompt(ids, command.n_gen, command.fit, limits)
    return ids


def admit_file(command: Generate, limits: Limits) -> tuple[Prompt, Ids]:
    """The prompt a `generate` command means, and its ids.

    Raises:
        RequestError: as admit_prompt.
    """
    _check_ids_of("logit_bias", (token for token, _ in command.sampling.logit_bias), limits)
    ids = read_ids(command.path, counted=True)
    _check_prompt(ids, command.n_gen, False, limits)
    return Prompt(id=command.id, n_gen=command.n_gen, sampling=command.sampling), ids


def admit_slot(command: Command, limits: Limits) -> None:
    """Check the slot number of a slot command, and that there is a disk tier for those that need it.

    Raises:
        RequestError: bad_slot, no_slot_dir.
    """
    disk = isinstance(command, Stored | LoadSnapshot | Drop) or (
        isinstance(command, Snapshot) and command.tier == "disk"
    )
    if disk and not limits.stored:
        raise RequestError("no_slot_dir")
    if isinstance(command, Snapshot | SnapshotThin | FreeSnapshot | LoadSnapshot):
        _check_slot(command.slot, limits)


def _check_prompt(ids: Ids, n_gen: int, fit: bool, limits: Limits) -> None:
    n = len(ids)
    # With fit the answer is cut to what is left, but room for one token there must be.
    if n + (min(n_gen, 1) if fit else n_gen) > limits.max_ctx:
        raise RequestError("overflow", {"prompt": n, "n_gen": n_gen, "max_ctx": limits.max_ctx})
    wrong = np.flatnonzero((ids < 0) | (ids >= limits.n_vocab))
    if len(wrong):
        at = int(wrong[0])
        raise RequestError("bad_token", {"at": at, "token": int(ids[at]), "vocab": limits.n_vocab})


def _check_slot(slot: int, limits: Limits) -> None:
    if slot >= limits.slots:
        raise RequestError("bad_slot", {"slot": slot, "slots": limits.slots})


def _check_ids_of(field: str, ids: Iterable[int], limits: Limits) -> None:
    for token in ids:
        if not 0 <= token < limits.n_vocab:
            raise RequestError("bad_args", {"field": field, "token": token, "vocab": limits.n_vocab})
