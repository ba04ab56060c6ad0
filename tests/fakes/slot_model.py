"""A daemon reduced to its slots. Its lines can be lost, delayed and reordered, which no real one can be told.

It checks nothing: a RESTORE of a slot with other tokens than the prompt's is remembered as `wrong`, where a
real daemon would refuse it. Requests run side by side, one `step` at a time in any order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slotd.client.cache_entries import WIDTH


@dataclass(slots=True)
class Running:
    """A request in the daemon."""

    number: int
    ids: bytes
    restore: int | None
    snap: tuple[int, int] | None  # (at, slot)
    started: bool = False
    snapped: bool = False


@dataclass(frozen=True, slots=True)
class Said:
    """One line. kind: restored, inline, failed (number, slot, length); done (number, ok, epoch); cleared."""

    kind: str
    number: int = -1
    slot: int = -1
    length: int = 0
    ok: bool = True
    epoch: int = 0
    kept: tuple[int, ...] = ()


@dataclass(slots=True)
class SlotModel:
    """Slots 0 .. n-1."""

    slots: dict[int, bytes] = field(default_factory=dict)
    epoch: int = 1
    running: dict[int, Running] = field(default_factory=dict)
    said: list[Said] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def step(self, number: int, *, snapshot_fails: bool = False) -> None:
        """The next thing that happens in a request: it starts, it takes its snapshot, it ends."""
        request = self.running[number]
        if not request.started:
            request.started = True
            self._start(request)
        elif request.snap is not None and not request.snapped:
            request.snapped = True
            at, slot = request.snap
            if snapshot_fails:
                self.said.append(Said("failed", number, slot))
            else:
                self.slots[slot] = request.ids[: at * WIDTH]
                self.said.append(Said("inline", number, slot, at))
        else:
            self.end(number)

    def _start(self, request: Running) -> None:
        if request.restore is None:
            return
        held = self.slots.get(request.restore)
        if held is None:
            self.end(request.number, ok=False)
            return
        if not request.ids.startswith(held):
            self.wrong.append(f"slot {request.restore} restored for another prompt")
        self.said.append(Said("restored", request.number, request.restore, len(held) // WIDTH))

    def end(self, number: int, *, ok: bool = True) -> None:
        """The request is over: done, failed or cancelled."""
        del self.running[number]
        self.said.append(Said("done", number, ok=ok, epoch=self.epoch))

    def run_out(self, kept: tuple[int, ...] = ()) -> None:
        """Out of memory: every slot goes, but those kept."""
        kept = tuple(slot for slot in kept if slot in self.slots)
        self.slots = {slot: self.slots[slot] for slot in kept}
        self.epoch += 1
        self.said.append(Said("cleared", epoch=self.epoch, kept=kept))
