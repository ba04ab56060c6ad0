"""The shell around `Caches`: what the bus says goes in, and what requests should carry comes out.

Everything the daemon says about slots arrives in the bus's reader thread before anybody who waits for the
same line goes on, so an answer is never seen before the caches know of it. Nothing in those callbacks waits.
What may block (loading, listing, files) is done by the thread that makes a request.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slotd.client import commands
from slotd.client.boundaries import Cuts, Markers, detect_markers, find_cuts
from slotd.client.cache_bindings import Entry
from slotd.client.cache_costs import Costs, Recent
from slotd.client.cache_disk import CacheDisk
from slotd.client.cache_entries import Identity, array_of, as_bytes
from slotd.client.caches import Caches, Plan
from slotd.protocol import messages
from slotd.protocol.errors import ConfigError, SlotdError
from slotd.protocol.messages import Prompt, Restore, Snap

if TYPE_CHECKING:
    from slotd.client.bus import Callbacks
    from slotd.client.session import Session
    from slotd.client.text import TextTools

logger = logging.getLogger(__name__)

#: Refusals of a RESTORE that mean: the slot is not what the caches take it for.
SLOT_FAULTS = frozenset({"empty_slot", "bad_slot", "prefix_mismatch", "prefix_shorter", "wrong_snapshot"})

#: How often a plan may first load something from disk.
_LOADS = 2

#: Refused requests that are remembered until their streams send them again.
_MOST_REFUSED = 64


@dataclass(slots=True)
class _Ticket:
    """One request on its way."""

    request: Prompt  # as it was asked for, without the caches' fields
    plan: Plan
    expected: int  # tokens that the daemon was expected to reuse on its own
    restored: bool = False
    produced: list[int] = field(default_factory=list)


class SlotCache:
    """The caches of one client, over all daemons that it has in its life.

    Args:
        callbacks: of the bus. Registered at once, so that they come before anybody else's, and before the
            first daemon speaks.
        prefix_slots, full_slots: slots of the daemon that each cache may use; both 0: nothing is cached.
        cache_dir: keep entries on disk, for a daemon that keeps its snapshots there; None: only in memory.
        byte_budget: most bytes of files of full entries, 0 is no limit.
    """

    def __init__(
        self,
        callbacks: Callbacks,
        new_id: Callable[[], str],
        *,
        prefix_slots: int,
        full_slots: int,
        cache_dir: Path | None = None,
        byte_budget: int = 0,
    ) -> None:
        self._wanted = prefix_slots + full_slots
        self._new_id = new_id
        self._cache_dir = cache_dir
        self._caches = Caches(prefix_slots, full_slots, byte_budget=byte_budget)
        self._lock = threading.RLock()
        self._disk = CacheDisk(self._caches, self._lock, new_id, cache_dir)
        self._session: Session | None = None
        self._text: TextTools | None = None
        self._markers: Markers | None = None
        self._markers_known = False
        self._costs = Costs()
        self._recent = Recent()
        self._tickets: dict[str, _Ticket] = {}
        self._refused: dict[str, _Ticket] = {}  # whose RESTORE the daemon did not take
        self._stale = 0
        if self._wanted:
            callbacks.register_event_callback(messages.AllCleared, self._take_all_cleared)
            callbacks.register_event_callback(messages.Restored, self._take_restored)
            callbacks.register_event_callback(messages.SnapInline, self._take_inline)
            callbacks.register_event_callback(messages.SnapInlineFailed, self._take_inline_failed)
            callbacks.register_event_callback(messages.Tokens, self._take_tokens)
            callbacks.register_event_callback(messages.Done, self._take_done)

    # ----- a daemon begins, the client ends

    def start(self, session: Session, text: TextTools) -> None:
        """Forget the daemon before, empty the slots of this one, and load what is known from disk.

        A daemon that does not say what it is, or does not answer, is used without caches. Again for a session
        that is in use: nothing is forgotten.
        """
        with self._lock:
            if session is self._session:
                return
        identity = None if not self._wanted else self._identity(session.hello, text)
        with self._lock:
            self._session = None
            self._tickets.clear()
            self._refused.clear()
            self._recent = Recent(max(4, _number(session.hello, "parallel")))
            self._text = text
        if identity is None:
            return
        slots = _number(session.hello, "slots")
        if slots < self._wanted:
            logger.warning("the daemon has %d slots, the caches wanted %d", slots, self._wanted)
        with self._lock:
            boot = str(session.hello.get("boot", ""))
            self._caches.reset(identity, boot, _number(session.hello, "epoch"), slots)
        try:
            self._sync(session)
            self._disk.open(session, identity)
        except SlotdError as error:
            logger.warning("no caches for this daemon: %s", error)
            return
        with self._lock:
            self._session = session

    def _identity(self, hello: Mapping[str, Any], text: TextTools) -> Identity | None:
        model, kv = hello.get("model"), hello.get("kv")
        named = model.get("identity") if isinstance(model, Mapping) else None
        if not isinstance(named, str) or not isinstance(kv, Mapping) or not _number(hello, "slots"):
            logger.info("the daemon names no slots, model identity or K/V types: nothing is cached")
            return None
        salt = "" if self._cache_dir is None else _salt(text)
        window, max_ctx = _number(kv, "window"), _number(hello, "max_ctx")
        return Identity(named, str(kv.get("k", "")), str(kv.get("v", "")), window, max_ctx, salt)

    def _sync(self, session: Session) -> None:
        """Empty the slots that are ours. Whatever they hold, nobody knows what it is."""
        ours = range(self._caches.prefix_slots + self._caches.full_slots)
        for slot in session.ask(commands.ListSlots(self._new_id())):
            if slot in ours:
                session.ask(commands.FreeSnapshot(self._new_id(), slot))

    def close(self) -> None:
        """Write what is not on disk yet. The client ends."""
        with self._lock:
            self._session = None
        self._disk.close()

    # ----- a request

    def dress(self, session: Session, request: Prompt) -> Prompt:
        """`request` with what the caches add: RESTORE of a slot, a snapshot on the way, or other ids.

        Follow it by sending what comes back, or by `unsent`.
        """
        with self._lock:
            if session is not self._session:
                return request
        self._disk.write()
        self._rebind(session)
        for _ in range(_LOADS):
            ticket = self._plan(request, restore=True)
            if ticket.plan.load is None:
                break
            self._disk.fill(session, ticket.plan.load)
        else:
            ticket = self._plan(request, restore=False)
        return self._issue(ticket)

    def again(self, request_id: str) -> Prompt | None:
        """After a refused RESTORE of ours: the same request without it, to be sent under the same id."""
        with self._lock:
            ticket = self._refused.pop(request_id, None)
            if ticket is None:
                return None
            return self._issue(self._plan(ticket.request, restore=False))

    def _plan(self, request: Prompt, *, restore: bool) -> _Ticket:
        assert request.ids is not None
        raw = as_bytes(request.ids)
        cuts = self._cuts(request)
        with self._lock:
            recent = self._recent
            costs = replace(self._costs, load=self._disk.seconds_per_token)
            plan = self._caches.plan(raw, cuts, costs=costs, expected=recent.worth, restore=restore)
            return _Ticket(request, plan, 0 if plan.restore is not None else recent.expected(plan.ids))

    def _issue(self, ticket: _Ticket) -> Prompt:
        request, plan = ticket.request, ticket.plan
        assert request.id is not None
        with self._lock:
            self._tickets[request.id] = ticket
        values = {each.name: getattr(request, each.name) for each in fields(request)}
        if plan.restore is not None or plan.reservation is not None:
            values["ids"] = array_of(plan.ids)
        if plan.reservation is not None:
            values["snap"] = Snap(plan.reservation.length, plan.reservation.slot)
            values["tier"] = "disk" if self._disk.active else None
        if plan.lease is not None:
            return Restore(slot=plan.lease.slot, **values)
        return Prompt(**values)

    def _cuts(self, request: Prompt) -> Cuts:
        ids = request.ids
        assert ids is not None
        if not self._markers_known:
            self._markers_known = True
            try:
                tokenizer = None if self._text is None else self._text.tokenizer_for(False)
                self._markers = None if tokenizer is None else detect_markers(tokenizer)
            except SlotdError as error:
                logger.info("prefixes are cut at pages: %s", error)
        return find_cuts(ids if isinstance(ids, array) else array("i", ids), self._markers)

    def second_try(self, request: Prompt) -> SecondTry:
        """For the stream of `request`, as `dress` returned it."""
        with self._lock:
            ticket = self._tickets.get(request.id or "")
            return SecondTry(self, ticket is not None and ticket.plan.lease is not None)

    def unsent(self, request_id: str, *, surely: bool) -> None:
        """The request was not sent. `surely`: nothing of it can have reached the daemon."""
        with self._lock:
            ticket = self._tickets.pop(request_id, None)
            if ticket is None:
                return
            if ticket.plan.lease is not None:
                self._caches.release(ticket.plan.lease)
            if ticket.plan.reservation is not None:
                self._caches.abort(ticket.plan.reservation, sent=not surely)

    def _rebind(self, session: Session) -> None:
        """Bind slots that outlived a clearing again, if the daemon says what they hold."""
        with self._lock:
            kept = self._caches.kept
        if not kept:
            return
        try:
            status = session.ask(commands.Status(self._new_id()))
        except SlotdError as error:
            logger.info("kept slots stay unused: %s", error)
            return
        slots = status.get("slots")
        with self._lock:
            for slot in kept:
                held = slots.get(str(slot)) if isinstance(slots, Mapping) else None
                held = held if isinstance(held, Mapping) else {}  # no evidence: given up, not asked again
                content, epoch = str(held.get("hash", "")), _number(status, "epoch")
                self._caches.rebind(slot, content, _number(held, "tokens"), epoch)

    # ----- slots that somebody else uses

    def claim(self, slot: int) -> None:
        """The program fills this slot itself: the caches leave it alone."""
        with self._lock:
            self._caches.claim(slot)

    def unclaim(self, slot: int) -> None:
        """The program has emptied this slot."""
        with self._lock:
            self._caches.unclaim(slot)

    def stats(self) -> dict[str, Any]:
        """See `Client.cache_stats`."""
        with self._lock:
            costs = {"prefill_tok_s": self._costs.prefill, "restore_s": self._costs.restore,
                     "load_s_per_token": self._disk.seconds_per_token}  # fmt: skip
            active = self._session is not None
            return {"active": active, **self._caches.stats(), "stale_restores": self._stale, "costs": costs,
                    "entries": self._entries()}  # fmt: skip

    def _entries(self) -> dict[int, dict[str, Any]]:
        entries: list[Entry] = [*self._caches.prefix_entries(), *self._caches.full_entries()]
        return {
            entry.slot: {"kind": entry.kind, "tokens": entry.length, "hits": entry.hits}
            for entry in entries
            if entry.slot is not None
        }

    # ----- what the daemon says; in the reader thread

    def _take_all_cleared(self, event: messages.AllCleared) -> None:
        with self._lock:
            prefix, full = self._caches.all_cleared(event.epoch, event.kept)
            self._recent.clear()
        logger.info("all-cleared: dropped %d prefix + %d full entries", prefix, full)

    def _take_restored(self, event: messages.Restored) -> None:
        with self._lock:
            ticket = self._tickets.get(event.id or "")
            if ticket is not None and ticket.plan.lease is not None:
                ticket.restored = event.slot == ticket.plan.lease.slot
                self._caches.release(ticket.plan.lease)

    def _take_inline(self, event: messages.SnapInline) -> None:
        with self._lock:
            ticket = self._tickets.get(event.id or "")
            if ticket is not None and ticket.plan.reservation is not None:
                self._caches.ack(ticket.plan.reservation, event.slot, event.cur_pos, event.hash or "")

    def _take_inline_failed(self, event: messages.SnapInlineFailed) -> None:
        with self._lock:
            ticket = self._tickets.get(event.id or "")
            if ticket is not None and ticket.plan.reservation is not None:
                self._caches.ack_untouched(ticket.plan.reservation, event.slot)

    def _take_tokens(self, event: messages.Tokens) -> None:
        with self._lock:
            ticket = self._tickets.get(event.id or "")
            if ticket is not None:
                ticket.produced.extend(event.ids)

    def _take_done(self, done: messages.Done) -> None:
        with self._lock:
            ticket = self._tickets.pop(done.id or "", None)
            if ticket is not None:
                self._settle(ticket, done)

    def _settle(self, ticket: _Ticket, done: messages.Done) -> None:
        plan, epoch, ok = ticket.plan, _number(done.fields, "epoch"), done.status != "err"
        if plan.lease is not None:
            self._caches.release(plan.lease)
            if not ok and done.fields.get("code") in SLOT_FAULTS:
                self._stale += 1
                self._caches.doubt(plan.lease.slot)
                self._refused[done.id or ""] = ticket
                while len(self._refused) > _MOST_REFUSED:  # nobody has asked for the oldest
                    del self._refused[next(iter(self._refused))]
        held = plan.reservation
        if held is None:
            self._caches.observe_epoch(epoch)
        elif self._caches.settle(held, ok=ok, epoch=epoch):
            self._disk.changed(held.key)
        if ok and done.status != "cancelled":
            self._measure(ticket, done)

    def _measure(self, ticket: _Ticket, done: messages.Done) -> None:
        reused = _number(done.fields, "reused")
        prompt, seconds = _number(done.fields, "prompt"), done.fields.get("prefill_s")
        if isinstance(seconds, int | float):
            self._costs = self._costs.measure_prefill(prompt - reused, float(seconds))
        restoring = done.fields.get("restore_s")
        if ticket.restored and isinstance(restoring, int | float):
            self._costs = self._costs.measure_restore(float(restoring))
        self._recent.judge(ticket.expected, reused)
        self._recent.add(ticket.plan.ids + as_bytes(ticket.produced[:-1]))  # the last one is never computed


class SecondTry:
    """What a stream does when its RESTORE is refused. `Stream` calls it by the protocol `stream.Again`."""

    def __init__(self, cache: SlotCache, restores: bool) -> None:
        self._cache = cache
        self._restores = restores

    def wanted(self, event: object) -> bool:
        """Whether `event` says that the slot was not what the caches took it for."""
        if not self._restores or not isinstance(event, messages.Done) or event.status != "err":
            return False
        return event.fields.get("code") in SLOT_FAULTS

    def request(self, id: str) -> Prompt | None:
        """See `SlotCache.again`."""
        return self._cache.again(id)

    def unsent(self, id: str, error: SlotdError) -> None:
        """See `SlotCache.unsent`; an argument that cannot be put on the wire never reached the daemon."""
        self._cache.unsent(id, surely=isinstance(error, ConfigError))


def _number(fields: Mapping[str, Any], name: str) -> int:
    """A count out of JSON or fields; 0 when it is none."""
    value = fields.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _salt(text: TextTools) -> str:
    """Stands for the way from messages to ids; "" without a tokenizer."""
    tokenizer = text.tokenizer_for(False)
    if tokenizer is None:
        return ""
    parts = (
        tokenizer.chat_template or "",
        tokenizer.bos_token,
        tokenizer.eos_token,
        str(tokenizer.vocab_size),
    )
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()
