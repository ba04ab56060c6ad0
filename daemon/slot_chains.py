"""Thick and thin slots: what each may be used for, and chains of them.

A thick slot holds a prefix, a thin one a span of it. A span is worth something only behind the very same
tokens, so a thin slot remembers all ids up to its end. Pages hold whole tiles of the sequence they came from:
where a span begins inside a page, its copy of that page also has what stands before it, and takes the place
of the page of the link in front.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from slotd.daemon.engine import Engine
from slotd.daemon.kv.pages import PAGE
from slotd.daemon.kv.slots import Slot
from slotd.daemon.retained import common_prefix
from slotd.protocol.errors import RequestError
from slotd.protocol.messages import ChainRestored, RestoreChain

Kind = Literal["thick", "thin"]


def check_spans(engine: Engine, verb: str) -> None:
    """K/V of a span can be put behind others; what a recurrent state has seen cannot.

    Raises:
        RequestError: unsupported, by a model with recurrent layers.
    """
    if engine.recurrence.state_bytes:
        raise RequestError("unsupported", {"verb": verb, "arch": engine.hyper.arch})


def free_for(slots: Mapping[int, Slot], number: int, kind: Kind) -> bool:
    """Whether a slot may be filled with this kind: it is empty or holds the same kind."""
    return number not in slots or slots[number].kind == kind


def check_free_for(slots: Mapping[int, Slot], number: int, kind: Kind) -> None:
    """A filled slot is overwritten only by its own kind.

    Raises:
        RequestError: bad_slot.
    """
    if not free_for(slots, number, kind):
        raise RequestError("bad_slot", {"slot": number, "kind": slots[number].kind})


def filled(slots: Mapping[int, Slot], number: int, kind: Kind) -> Slot:
    """The slot of this number and kind.

    Raises:
        RequestError: empty_slot, bad_slot.
    """
    check_free_for(slots, number, kind)
    held = slots.get(number)
    if held is None:
        raise RequestError("empty_slot", {"slot": number})
    return held


def prefix_in(slots: Mapping[int, Slot], number: int, kind: Kind, ids: npt.NDArray[np.int32]) -> Slot:
    """The slot of this number and kind, all of whose tokens `ids` start with.

    Raises:
        RequestError: empty_slot, bad_slot, prefix_shorter, prefix_mismatch.
    """
    held = filled(slots, number, kind)
    if len(ids) < len(held):
        raise RequestError("prefix_shorter", {"slot": number, "prompt": len(ids), "cur_pos": len(held)})
    shared = common_prefix(ids, np.frombuffer(held.tokens, dtype=np.int32))
    if shared < len(held):
        raise RequestError("prefix_mismatch", {"slot": number, "at": shared, "cur_pos": len(held)})
    return held


def chain(slots: Mapping[int, Slot], command: RestoreChain, ids: npt.NDArray[np.int32]) -> Slot:
    """What the slots of a chain hold together, as one snapshot of the first tokens of `ids`.

    It has no references of its own to its pages. Only a chain that is one thick slot has logits.

    Raises:
        RequestError: empty_slot, bad_slot, bad_chain, prefix_shorter, prefix_mismatch; each names the slot.
    """
    whole = Slot(array("i"), (), None)
    if command.thick >= 0:
        whole = prefix_in(slots, command.thick, "thick", ids)
    for number in command.thins:
        link = filled(slots, number, "thin")
        start = link.kv_start or 0
        if start != len(whole):
            raise RequestError("bad_chain", {"slot": number, "kv_start": start, "expected": len(whole)})
        prefix_in(slots, number, "thin", ids)
        whole = Slot(link.tokens, whole.pages[: start // PAGE] + link.pages, None)
    return whole


def chain_restored(slots: Mapping[int, Slot], command: RestoreChain) -> ChainRestored:
    """The line that says where a prompt starts from."""
    last = command.thins[-1] if command.thins else command.thick
    cur_pos = len(slots[last]) if last >= 0 else 0
    return ChainRestored(thick=command.thick, thins=len(command.thins), cur_pos=cur_pos)
