"""The client's account of the daemon's slots: which prompt prefixes and which whole prompts they hold.

A pure state machine: no I/O, no clock, no lock. Its one promise is that a slot is never taken for something
that it does not hold. An entry comes into being in two steps: `plan` reserves a slot, and `confirm` makes the
entry when the daemon has said which slot it filled with how many tokens, in the same process and the same
slot epoch. Whatever else happens, the mapping is dropped: a lost hit, never a wrong hit.

Prefix entries live in slots [0, prefix_slots), full entries in [prefix_slots, prefix_slots + full_slots).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from slotd.client.boundaries import Cuts
from slotd.client.cache_bindings import Bindings, Entry
from slotd.client.cache_costs import Costs
from slotd.client.cache_entries import WIDTH, FullEntry, Identity, Kind, PrefixEntry, Reservation
from slotd.client.cache_eviction import full_victim, prefix_victim

#: A shorter prefix is not worth a slot.
MIN_PREFIX = 16

#: Names of all counts, in the order in which they are shown.
COUNTS = (
    "prefix_hits", "prefix_hit_tokens", "full_hits", "full_hit_tokens", "misses", "passed", "reserved",
    "confirmed", "refused", "aborted", "doubted", "no_slot", "cleared", "rebound",
)  # fmt: skip


@dataclass(eq=False, frozen=True, slots=True)
class Lease:
    """A request on its way starts from this slot: nobody else may fill it meanwhile."""

    slot: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request shall do.

    Attributes:
        ids: what to send: the prompt, or what a full entry has in its place.
        restore: start from the slot of this entry, under `lease`.
        load: first load the file of a cold entry into this slot, then plan again.
        reservation: fill this slot on the way.
    """

    ids: bytes
    restore: Entry | None = None
    lease: Lease | None = None
    load: Reservation | None = None
    reservation: Reservation | None = None


class Caches:
    """Both caches. `reset` it for every new daemon process before use."""

    def __init__(self, prefix_slots: int = 4, full_slots: int = 0, *, byte_budget: int = 0) -> None:
        self._wanted = (prefix_slots, full_slots)
        self.prefix_slots = self.full_slots = 0
        self.identity: Identity | None = None
        self.boot = ""
        self.epoch = 0
        self.counts: Counter[str] = Counter()  # they survive everything
        self._bindings = Bindings(byte_budget)
        self._pending: list[Reservation] = []
        self._leases: set[Lease] = set()
        self._claimed: set[int] = set()
        self._kept: dict[int, Entry] = {}

    # ----- the daemon's life

    def reset(self, identity: Identity, boot: str, epoch: int, slots: int) -> None:
        """A new daemon process with so many slots: nothing is held, nothing is on its way.

        Entries with files become cold when the identity is the same, and are dropped when it is not.
        """
        self._bindings.unbind_all()
        if identity != self.identity:
            self._bindings.cold.clear()
            self._bindings.full.clear()
        self._pending.clear()
        self._leases.clear()
        self._claimed.clear()
        self._kept.clear()
        self.identity, self.boot, self.epoch = identity, boot, epoch
        prefix, full = self._wanted  # too few for both: full ones may take half
        self.full_slots = min(full, max(slots - prefix, slots // 2))
        self.prefix_slots = min(prefix, slots - self.full_slots)

    def all_cleared(self, epoch: int | None = None, kept: Iterable[int] = ()) -> tuple[int, int]:
        """The daemon has given its slots up: drop every binding, void every reservation, whatever is enabled.

        Those of the slots in `kept` are remembered for `rebind`. May come twice. Returns how many prefix and
        full bindings were dropped.
        """
        candidates = {entry.slot: entry for entry in self._visible()}
        candidates |= {held.slot: _entry_of(held) for held in self._pending if held.acked and not held.void}
        dropped = self._bindings.unbind_all()
        for held in self._pending:
            held.void, held.victim = True, None
        if epoch is not None and epoch > self.epoch:
            self.epoch = epoch
            self._kept = {slot: candidates[slot] for slot in kept if slot in candidates}
        else:
            self._kept.clear()
        self.counts["cleared"] += 1
        return dropped

    def observe_epoch(self, epoch: int) -> None:
        """An answer carried this epoch. A later one than ours means that a clearing was not heard."""
        if epoch > self.epoch:
            self.all_cleared(epoch)

    @property
    def kept(self) -> tuple[int, ...]:
        """Slots that `rebind` may still bind."""
        return tuple(self._kept)

    def rebind(self, slot: int, content: str, length: int, epoch: int) -> bool:
        """Bind a slot that outlived a clearing again.

        Args:
            content, length: what the daemon says, in the new epoch, that the slot holds.
        """
        entry = self._kept.get(slot)
        if entry is None or self.identity is None or epoch != self.epoch or slot in self._occupied():
            return False
        del self._kept[slot]
        if entry.length != length or self.identity.content(entry.ids) != content:
            return False
        self._bindings.bind(entry, slot)
        self.counts["rebound"] += 1
        return True

    # ----- a request

    def plan(
        self,
        raw: bytes,
        cuts: Cuts,
        *,
        costs: Costs | None = None,
        expected: Callable[[bytes], int] = lambda ids: 0,
        restore: bool = True,
    ) -> Plan:
        """Decide what a request for the prompt `raw` starts from and what it leaves behind.

        Args:
            expected: tokens that the daemon would reuse on its own, fewer where that is not sure.
            restore: False: do not start from a slot (one was refused just now).
        """
        costs = costs or Costs()
        if self.identity is None or not self.prefix_slots + self.full_slots:
            return Plan(raw)
        whole = self._look_up_full(raw) if self.full_slots else None
        ids = raw if whole is None else whole.ids
        found: list[Entry] = [*self._look_up_prefix(ids)] if self.prefix_slots else []
        if whole is not None and whole.slot is not None:
            found.append(whole)
        start = self._choose(found, costs, expected(ids)) if restore else None
        if start is not None and start.slot is None:
            loading = self._reserve("prefix", start.key, start.ids, start.length, None)
            if loading is not None:
                return Plan(ids, load=loading)
            start = self._choose([e for e in found if e.slot is not None], costs, expected(ids))
        lease = None if start is None else self._hit(start)
        if start is None:
            self.counts["passed" if found else "misses"] += 1
        return Plan(ids, start, lease, None, self._snap(raw, ids, cuts, lease))

    def _choose(self, found: list[Entry], costs: Costs, expected: int) -> Entry | None:
        """The entry that saves most time, when that is more than the daemon would save on its own."""
        best: Entry | None = None
        most = costs.saved(expected) + costs.restore
        for entry in found:
            saved = costs.saved(entry.length, cold=entry.slot is None)
            if saved > 0 and saved >= most:
                best, most = entry, saved
        return best

    def _hit(self, entry: Entry) -> Lease:
        assert entry.slot is not None
        kind = "prefix" if isinstance(entry, PrefixEntry) else "full"
        entry.hits += 1
        self.counts[f"{kind}_hits"] += 1
        self.counts[f"{kind}_hit_tokens"] += entry.length
        lease = Lease(entry.slot)
        self._leases.add(lease)
        return lease

    def _look_up_full(self, raw: bytes) -> FullEntry | None:
        assert self.identity is not None
        entry = self._bindings.full.get(self.identity.key(raw))
        if entry is None or self._is_victim(entry):
            return None
        self._bindings.touch(entry)
        return entry

    def _look_up_prefix(self, ids: bytes) -> list[PrefixEntry]:
        """All entries, bound and cold, that the ids start with, the deepest last; each counts as used."""
        entries = (*self._bindings.prefix.values(), *self._bindings.cold.values())
        found = [entry for entry in entries if ids.startswith(entry.ids) and not self._is_victim(entry)]
        found.sort(key=lambda entry: entry.length)
        for entry in found:
            self._bindings.touch(entry)
        return found

    def _snap(self, raw: bytes, ids: bytes, cuts: Cuts, lease: Lease | None) -> Reservation | None:
        """Reserve a slot for the prompt's target cut, else for the whole prompt, unless it is held."""
        assert self.identity is not None
        if self.prefix_slots and ids is raw and cuts.target is not None:
            prefix = raw[: cuts.target * WIDTH]
            key = self.identity.key(prefix)
            known = key in self._bindings.prefix or self._is_reserved("prefix", key)
            if not known and MIN_PREFIX <= cuts.target <= len(raw) // WIDTH:
                return self._reserve("prefix", key, prefix, cuts.target, lease)
        if self.full_slots:
            key = self.identity.key(raw)
            entry = self._bindings.full.get(key)
            if (entry is None or entry.slot is None) and not self._is_reserved("full", key):
                return self._reserve("full", key, ids, len(raw) // WIDTH, lease, prompt=raw)
        return None

    def prepare_load(self, key: str) -> Reservation | None:
        """Reserve a slot for the file of a cold prefix entry, or for computing a cold full entry again."""
        cold, whole = self._bindings.cold.get(key), self._bindings.full.get(key)
        if cold is not None and not self._is_reserved("prefix", key):
            return self._reserve("prefix", key, cold.ids, cold.length, None)
        if whole is not None and whole.slot is None and not self._is_reserved("full", key):
            return self._reserve("full", key, whole.ids, whole.raw_length, None)
        return None

    def _is_reserved(self, kind: Kind, key: str) -> bool:
        return any((held.kind, held.key) == (kind, key) and not held.void for held in self._pending)

    def _reserve(
        self, kind: Kind, key: str, ids: bytes, raw_length: int, own: Lease | None, prompt: bytes = b""
    ) -> Reservation | None:
        """A free slot by occupancy, else that of a victim that no other request starts from."""
        leased = {lease.slot for lease in self._leases if lease is not own}
        taken = self._occupied() | leased
        victim: Entry | None = None
        slot = next((slot for slot in self._range(kind) if slot not in taken), None)
        if slot is None:
            victim = self._victim(kind, ids, prompt, leased)
            slot = None if victim is None else victim.slot
        if slot is None:
            self.counts["no_slot"] += 1
            return None
        self._kept.pop(slot, None)
        held = Reservation(kind, key, ids, raw_length, slot, victim, self.epoch, self.boot)
        self._pending.append(held)
        self.counts["reserved"] += 1
        return held

    def _victim(self, kind: Kind, ids: bytes, prompt: bytes, leased: set[int]) -> Entry | None:
        assert self.identity is not None
        free = [entry for entry in self._visible() if entry.slot not in leased]
        if kind == "prefix":
            prefix = [entry for entry in free if isinstance(entry, PrefixEntry)]
            return prefix_victim(prefix, ids, self._bindings.away(ids))
        full = [entry for entry in free if isinstance(entry, FullEntry)]
        return full_victim(full, prompt, self.identity.key)

    # ----- its outcome

    def ack(self, held: Reservation, slot: int, length: int, content: str = "") -> None:
        """The daemon says that this request filled `slot` with `length` tokens, and a file `content`."""
        held.acked = slot == held.slot and length == held.length
        held.untouched = False
        held.content = content

    def ack_untouched(self, held: Reservation, slot: int) -> None:
        """The daemon says that the snapshot failed and that `slot` is as it was."""
        held.untouched = slot == held.slot and not held.acked

    def settle(self, held: Reservation, *, ok: bool, epoch: int) -> bool:
        """The request has ended: confirm if it went well and was acknowledged, else abort."""
        if ok and held.acked:
            return self.confirm(held, slot=held.slot, length=held.length, epoch=epoch, boot=held.boot)
        self.observe_epoch(epoch)
        self.abort(held)
        return False

    def confirm(self, held: Reservation, *, slot: int, length: int, epoch: int, boot: str) -> bool:
        """Make the entry, if slot, length, epoch and process are those that were reserved.

        The victim goes, and so does any other entry of this slot. False: refused, as `abort` does it.
        """
        self.observe_epoch(epoch)
        fits = (slot, length) == (held.slot, held.length)
        same = held.epoch == epoch == self.epoch and held.boot == boot == self.boot
        if held not in self._pending or held.void or not fits or not same:
            self.counts["refused"] += 1
            self.abort(held)
            return False
        self._pending.remove(held)
        self._bindings.bind(_entry_of(held), held.slot)
        self.counts["confirmed"] += 1
        self._trim()
        return True

    def abort(self, held: Reservation, *, sent: bool = True) -> None:
        """The slot was not filled, or nobody knows.

        The victim comes back only when the slot surely holds it still: the request was never sent, or the
        daemon said that the slot is as it was. May be called for a reservation that is settled already.
        """
        if held not in self._pending:
            return
        self._pending.remove(held)
        self.counts["aborted"] += 1
        if held.victim is not None and sent and not held.untouched:
            self._bindings.unbind(held.victim)
            self.counts["doubted"] += 1

    def release(self, lease: Lease) -> None:
        """The request has started from its slot, or has ended."""
        self._leases.discard(lease)

    def doubt(self, slot: int) -> None:
        """The daemon does not agree about this slot: forget what it is taken for."""
        self.counts["doubted"] += self._bindings.empty(slot)

    # ----- slots of others, entries from files

    def claim(self, slot: int) -> None:
        """Somebody else fills this slot: it is no longer ours."""
        self._give_up(slot)
        self._claimed.add(slot)

    def unclaim(self, slot: int) -> None:
        """Somebody else has emptied this slot: it may be used again."""
        self._give_up(slot)
        self._claimed.discard(slot)

    def _give_up(self, slot: int) -> None:
        self._bindings.empty(slot)
        self._kept.pop(slot, None)
        for held in self._pending:
            if held.slot == slot:
                held.void, held.victim = True, None

    def adopt_prefix(self, ids: bytes, *, content: str, hits: int = 0) -> None:
        """A cold entry for a file that the daemon has; later ones count as used later."""
        assert self.identity is not None
        self._bindings.adopt_prefix(
            PrefixEntry(self.identity.key(ids), ids, None, hits=hits, content=content)
        )

    def adopt_full(
        self, key: str, ids: bytes, raw_length: int, *, artifact_bytes: int, hits: int = 0
    ) -> None:
        """A cold full entry out of a file of our own."""
        self._bindings.adopt_full(
            FullEntry(key, ids, raw_length, None, hits=hits, artifact_bytes=artifact_bytes)
        )
        self._trim()

    def drop_cold(self, key: str) -> None:
        """The daemon has no usable file of this entry any more."""
        self._bindings.cold.pop(key, None)

    def set_artifact(self, key: str, artifact_bytes: int) -> None:
        """The file of a full entry was written; over the byte budget the worst entries go."""
        if key in self._bindings.full:
            self._bindings.full[key].artifact_bytes = artifact_bytes
            self._trim()

    def drop_full(self, key: str) -> None:
        """The file of a full entry is gone or bad: without it the entry cannot be used."""
        self._bindings.drop_full(key)

    def take_garbage(self) -> list[str]:
        """Keys of full entries whose files are to be deleted; each is told once."""
        return self._bindings.take_garbage()

    def _trim(self) -> None:
        assert self.identity is not None
        self._bindings.trim_full(self.identity.key, {lease.slot for lease in self._leases})

    # ----- looking

    def prefix_entries(self) -> list[PrefixEntry]:
        """Bound prefix entries that a request may start from, least recently used first."""
        seen = [entry for entry in self._bindings.prefix.values() if not self._is_victim(entry)]
        return sorted(seen, key=lambda entry: entry.used)

    def cold_entries(self) -> list[PrefixEntry]:
        """Prefix entries that only a file holds, least recently used first."""
        return sorted(self._bindings.cold.values(), key=lambda entry: entry.used)

    def full_entries(self) -> list[FullEntry]:
        """Full entries, cold ones included, least recently used first."""
        seen = [entry for entry in self._bindings.full.values() if not self._is_victim(entry)]
        return sorted(seen, key=lambda entry: entry.used)

    @property
    def pending(self) -> int:
        """Slots that requests on their way may fill."""
        return len(self._pending)

    @property
    def leases(self) -> int:
        """Requests that are to start from a slot and have not."""
        return len(self._leases)

    def stats(self) -> dict[str, object]:
        """Occupancy now, and counts since the client was made."""
        prefix, full = self.prefix_entries(), self.full_entries()
        return {
            "epoch": self.epoch,
            "prefix": {"slots": self.prefix_slots, "entries": len(prefix),
                       "tokens": sum(entry.length for entry in prefix), "cold": len(self._bindings.cold)},
            "full": {"slots": self.full_slots, "entries": len(full),
                     "tokens": sum(entry.length for entry in full),
                     "cold": sum(entry.slot is None for entry in full)},
            "pending": len(self._pending),
            **{name: self.counts[name] for name in COUNTS},
        }  # fmt: skip

    # ----- inside

    def _range(self, kind: Kind) -> Iterator[int]:
        first = 0 if kind == "prefix" else self.prefix_slots
        count = self.prefix_slots if kind == "prefix" else self.full_slots
        return (slot for slot in range(first, first + count) if slot not in self._claimed)

    def _occupied(self) -> set[int]:
        return self._bindings.slots() | {held.slot for held in self._pending}

    def _visible(self) -> Iterator[Entry]:
        return (entry for entry in self._bindings.bound() if not self._is_victim(entry))

    def _is_victim(self, entry: Entry) -> bool:
        return any(held.victim is entry for held in self._pending)


def _entry_of(held: Reservation) -> Entry:
    """The entry that a reservation becomes."""
    if held.kind == "prefix":
        return PrefixEntry(held.key, held.ids, held.slot, content=held.content)
    return FullEntry(held.key, held.ids, held.raw_length, held.slot, content=held.content)
