"""What to give up when memory runs out, and in which order. Pure: decides, does nothing.

A step that fails opens a `Ladder`. The caller asks it for the next rung with what is in memory now, carries
the rung out, and tries the step again when the rung says so. Under the policy `ladder` the rungs get worse:

1. `Trim`: cached pool blocks go; nothing is lost.
2. `GiveUp`: the oldest ended sequence goes; its prefix has to be computed again. One at a time.
   `Move`: a slot moves to host memory, the one used least recently first; nothing is lost. Only slots that
   own device bytes nobody else holds: a page that a running sequence shares frees nothing.
   `DropDraft`: the draft model goes for good; answers stay the same and take longer.
3. `Clear`: all slots that still hold device memory go, once for each step that fails.
4. `Fail`: this request alone fails.

The policy `seed` has one rung: all slots of every tier in memory go, whatever they are worth, and the
request fails. `once` (one-shot runs) has none. At `prefill_embed` every policy fails at once.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass

#: The site whose failure ends the request and costs nobody anything (S120).
EMBED = "prefill_embed"


class Policy(enum.Enum):
    """What running out of memory may cost; the values are those of `--oom-policy`, and one-shot's own."""

    LADDER = "ladder"
    SEED = "seed"
    ONCE = "once"


class Extent(enum.Enum):
    """How far a ladder may go."""

    ALL = "all"
    #: Rungs 1 and 2, the draft left alone: for what can wait or can be done without.
    LOSSLESS = "lossless"


@dataclass(frozen=True, slots=True)
class Held:
    """One filled slot.

    Attributes:
        slot: its number.
        tier: device or host.
        bytes: what it takes whole, in either tier.
        own_bytes: device bytes that go when it goes: pages and logits that nobody else holds.
        last_used: seconds on a clock that only grows.
        pinned: the request at hand has acknowledged this slot, or starts from it.
    """

    slot: int
    tier: str
    bytes: int
    own_bytes: int
    last_used: float
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Situation:
    """What could be given up now.

    Attributes:
        ended: how many ended sequences could be given up.
        slots: the filled slots.
        host_room: most bytes that one slot may take in the host tier; 0 = there is none.
        draft: whether a draft model is loaded.
    """

    ended: int
    slots: tuple[Held, ...]
    host_room: int
    draft: bool = False


@dataclass(frozen=True, slots=True)
class Trim:
    """Release cached blocks, then try again."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Close the oldest ended sequence, then try again."""


@dataclass(frozen=True, slots=True)
class Move:
    """Move a slot to the host tier, then try again; when it can not be moved ask for another rung."""

    slot: int


@dataclass(frozen=True, slots=True)
class DropDraft:
    """Unload the draft model for good, then try again."""


@dataclass(frozen=True, slots=True)
class Clear:
    """Free slots and announce it.

    Attributes:
        freed: what goes.
        kept: what stays.
        ended: ended sequences go too.
        retry: try the step again; else the request fails.
    """

    freed: tuple[int, ...]
    kept: tuple[int, ...]
    ended: bool
    retry: bool


@dataclass(frozen=True, slots=True)
class Fail:
    """End this request with `oom`."""


Rung = Trim | GiveUp | Move | DropDraft | Clear | Fail


class Ladder:
    """The ladder of one failing step.

    Args:
        policy: see the module's text.
        site: where memory ran out.
        extent: how far it may go; `seed` asks for nothing between ALL and failing.
    """

    def __init__(self, policy: Policy, site: str, extent: Extent = Extent.ALL) -> None:
        self._policy = policy if site != EMBED else Policy.ONCE
        self._extent = extent
        self._trimmed = self._cleared = False
        self._tried: set[int] = set()

    def next(self, now: Situation) -> Rung:
        """The next rung. A slot is offered for a move once."""
        match self._policy:
            case Policy.ONCE:
                return Fail()
            case Policy.SEED:
                return self._next_of_seed(now)
            case Policy.LADDER:
                return self._next_of_ladder(now)

    def _next_of_seed(self, now: Situation) -> Rung:
        if self._cleared or self._extent is Extent.LOSSLESS:
            return Fail()
        self._cleared = True
        return Clear(_numbers(now.slots), (), ended=True, retry=False)

    def _next_of_ladder(self, now: Situation) -> Rung:
        if not self._trimmed:
            self._trimmed = True
            return Trim()
        if now.ended and not self._cleared:
            return GiveUp()
        movable = [held for held in now.slots if self._may_move(held, now.host_room)]
        if movable and not self._cleared:
            oldest = min(movable, key=lambda held: (held.last_used, held.slot))
            self._tried.add(oldest.slot)
            return Move(oldest.slot)
        if now.draft and self._extent is Extent.ALL:
            return DropDraft()
        freed = [held for held in now.slots if held.tier == "device" and not held.pinned]
        if freed and not self._cleared and self._extent is Extent.ALL:
            self._cleared = True
            kept = [held for held in now.slots if held not in freed]
            return Clear(_numbers(freed), _numbers(kept), ended=False, retry=True)
        return Fail()

    def _may_move(self, held: Held, host_room: int) -> bool:
        return (
            held.tier == "device"
            and not held.pinned
            and held.slot not in self._tried
            and held.own_bytes > 0
            and held.bytes <= host_room
        )


def _numbers(slots: Collection[Held]) -> tuple[int, ...]:
    return tuple(sorted(held.slot for held in slots))
