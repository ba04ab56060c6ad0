"""The engine: one model, its sequences and slots, and the one primitive, forward and commit over rows.

Used by one thread. A programming error (a bad path, an unknown sequence) is a ValueError; everything that
can happen to a correct caller has a type of its own. When a call raises, the committed state of every
sequence is what it was before; open rows of the sequences named in the call are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.daemon.backend import Backend, Outputs, Runner
from slotd.daemon.draft_rows import Proposals
from slotd.daemon.drafting import Drafting
from slotd.daemon.kv.host_arena import HostArena
from slotd.daemon.kv.host_tier import HostTier
from slotd.daemon.kv.page_tables import extend, make_writable, place_of
from slotd.daemon.kv.pages import PAGE, pages_for
from slotd.daemon.kv.slots import Slot, Slots
from slotd.daemon.models.model import Interrupt
from slotd.daemon.recurrence import Recurrence, checkpoints_in
from slotd.daemon.row_checks import check_path, check_rows, row_counts
from slotd.daemon.rows import Kind, OpenRows, Rows
from slotd.daemon.sequence import Sequence
from slotd.daemon.weights.identity import file_stamp
from slotd.daemon.weights.kv_formats import check_kv_formats
from slotd.daemon.weights.reader import ModelFile, open_model
from slotd.protocol.errors import ModelError


class Engine:
    """One loaded model.

    Args:
        file: the open model file; may be closed afterwards.
        backend: the device that computes.
        k_type, v_type: how K and V are stored, by name; default: the backend's.
        max_ctx: most positions of a sequence; default: what the model was made for.
        n_slots: number of slots.
        host_cache: bytes of the host tier of slots, 0 = none.
        arena: the memory of the host tier; None: ordinary memory.
        checkpoint_every: see `recurrence.Recurrence`; matters to models with recurrent layers.
        draft: the file of a draft; where it does not fit, `drafting.refusal` says why and there is none.
        draft_ctx: positions that the draft sees of a sequence, at least.

    Raises:
        ConfigError: a K/V type that is unknown or does not fit the model's heads, or a promise of the backend
            that this machine cannot keep.
        ModelError: an architecture without code.
        OutOfDeviceMemory: the weights do not fit.
    """

    def __init__(
        self,
        file: ModelFile,
        backend: Backend,
        *,
        k_type: str | None = None,
        v_type: str | None = None,
        max_ctx: int | None = None,
        n_slots: int = 8,
        host_cache: int = 0,
        arena: HostArena | None = None,
        checkpoint_every: int = 4096,
        draft: Path | None = None,
        draft_ctx: int = 2048,
    ) -> None:
        self.backend = backend
        self.k_type, self.v_type = k_type or backend.kv_type, v_type or backend.kv_type
        self.hyper = h = file.hyper
        check_kv_formats(h, self.k_type, self.v_type)
        self.max_ctx = h.n_ctx_train if max_ctx is None else max_ctx
        self.memory = backend.memory
        self.store = backend.page_store(h, self.k_type, self.v_type)
        self.recurrence = Recurrence(backend.recurrent_store(h), checkpoint_every)
        self.slots = Slots(self.store.pages, n_slots)
        self.host_tier = HostTier(
            backend, self.store, self.slots, host_cache, arena,
            {"model": file.identity, "k": self.k_type, "v": self.v_type, "math": backend.math},
            self.recurrence.store,
        )  # fmt: skip
        self.identity = file.identity
        self.model_name = str(file.header.metadata.get("general.name", file.path.stem))
        self.path = file.path
        self._stamp = file_stamp(file.path)
        self._loaded: Runner | None = backend.load_model(file, self.store, self.max_ctx)
        self.drafting = Drafting(backend, draft, h, self.max_ctx, draft_ctx)
        self.drafting.load(self._loaded)
        self._sequences: set[Sequence] = set()
        self._open: dict[Sequence, OpenRows] = {}

    # ----- the weights

    @property
    def parked(self) -> bool:
        """Whether the weights are away."""
        return self._loaded is None

    def park(self) -> bool:
        """Give the memory of the weights back, the draft's too; sequences and slots stay.

        False when they are away already.
        """
        if self._loaded is None:
            return False
        self._loaded = None
        self.drafting.unload()
        self.memory.retire()
        self.memory.trim()
        return True

    def unpark(self) -> bool:
        """Load the weights again, and the draft if it fits. False when they are here.

        Raises:
            ModelError: the file is not the one that was loaded at start.
            OutOfDeviceMemory: they do not fit now.
        """
        if self._loaded is not None:
            return False
        with open_model(self.path) as file:
            if file.identity != self.identity or file_stamp(self.path) != self._stamp:
                raise ModelError(f"{self.path}: the file has changed since the daemon started")
            self._loaded = self.backend.load_model(file, self.store, self.max_ctx)
        self.drafting.load(self._loaded)
        return True

    @property
    def _runner(self) -> Runner:
        if self._loaded is None:
            raise ValueError("the weights are parked")
        return self._loaded

    # ----- sequences

    def open(self) -> Sequence:
        """A new, empty sequence."""
        sequence = Sequence()
        self._sequences.add(sequence)
        return sequence

    def close(self, sequence: Sequence) -> None:
        """End a sequence; its pages go unless a slot or another sequence holds them."""
        self.drop(sequence)
        self._sequences.remove(sequence)
        self.drafting.forget(sequence)
        self.store.pages.release(sequence.pages)
        sequence.pages, sequence.state, sequence.checkpoints = [], None, {}

    def reserve(self, sequence: Sequence, n_tokens: int, site: str | None = None) -> None:
        """Pages for n_tokens places in all, so that forwards up to there never need one.

        site: the site that is passed; without one a failure is named prefill_build, where the pages would
        have been taken.

        Raises:
            OutOfDeviceMemory: the sequence has the pages it had.
        """
        self._known(sequence)
        with self.memory.within("prefill_build") if site is None else self.memory.site(site):
            extend(self.store, sequence.pages, n_tokens)

    def drop(self, sequence: Sequence) -> None:
        """Forget the open rows, if any."""
        self._known(sequence)
        self._open.pop(sequence, None)
        sequence.open_rows = 0
        sequence.open_state = None

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Forget everything behind `length` committed tokens, reserved pages included.

        Raises:
            ValueError: more tokens than there are, or a length that cannot be resumed from.
            OutOfDeviceMemory: no room for the state there.
        """
        self.drop(sequence)
        if not 0 <= length <= len(sequence):
            raise ValueError(f"cannot truncate {len(sequence)} tokens to {length}")
        if length < len(sequence):
            sequence.state = self.recurrence.state_at(sequence, length)
            sequence.checkpoints = checkpoints_in(sequence, length)
        del sequence.tokens[length:]
        keep = pages_for(length)
        self.store.pages.release(sequence.pages[keep:])
        del sequence.pages[keep:]
        self.drafting.truncate(sequence, length)

    def fork(self, source: Sequence | Slot, length: int | None = None) -> Sequence:
        """A new sequence with the first `length` committed tokens of another, sharing its pages.

        Raises:
            ValueError: more tokens than there are, or a length that cannot be resumed from.
            OutOfDeviceMemory: no room for the recurrent state.
        """
        length = len(source) if length is None else length
        if isinstance(source, Sequence):
            self._known(source)
        if not 0 <= length <= len(source):
            raise ValueError(f"cannot fork {length} of {len(source)} tokens")
        state, checkpoints = self.recurrence.state_at(source, length), checkpoints_in(source, length)
        pages = list(source.pages[: pages_for(length)])
        self.store.pages.share(pages)
        sequence = self.open()
        sequence.tokens, sequence.pages = source.tokens[:length], pages
        sequence.state, sequence.checkpoints = state, checkpoints
        self.drafting.fork(source, length, sequence)
        return sequence

    # ----- the one primitive

    def forward(self, rows: Rows, kind: Kind, interrupt: Interrupt | None = None) -> Outputs:
        """Compute rows behind the committed end of their sequences and leave them open.

        Open rows of these sequences are dropped first. `interrupt` is asked between layers.

        Raises:
            ValueError: malformed rows.
            OutOfDeviceMemory: sites prefill_build, prefill_embed, prefill_compute, in this order; decode (one
                row for each sequence); verify (more).
            DeviceLost: the device is gone.
            Interrupted: interrupt() said so.
        """
        check_rows(rows, kind, self.hyper.n_vocab, self.max_ctx)
        self.memory.check_device()
        for sequence in rows.sequences:
            self._known(sequence)
        for sequence in rows.sequences:
            self.drop(sequence)
        try:
            outputs = self._compute(rows, kind, interrupt)
        except BaseException:
            for sequence in rows.sequences:
                sequence.open_state = None
            raise
        start = 0
        for sequence, n in zip(rows.sequences, row_counts(rows), strict=True):
            inside = slice(start, start + n)
            self._open[sequence] = OpenRows(start, rows.tokens[inside], rows.parents[inside], kind)
            sequence.open_rows = n
            start += n
        return outputs

    def commit(self, sequence: Sequence, path: SequenceOf[int]) -> None:
        """Make a root path of rows of the last call permanent, in order; the other rows are forgotten.

        path: row numbers of that call, each the child of the one before, the first one a child of the
        committed end.

        Raises:
            ValueError: no forward is open, or not such a path; nothing has changed then.
            OutOfDeviceMemory: site commit; the rows stay open.
        """
        self._known(sequence)
        opened = self._open.get(sequence)
        if opened is None:
            raise ValueError("no forward is open on this sequence")
        local = check_path(opened.parents, opened.start, path)
        self.recurrence.check_path(opened.kind, len(opened.tokens), local)
        with self.memory.site("commit"):
            self._move(sequence, local)
        self.recurrence.commit(sequence, local)
        length = len(sequence)
        sequence.tokens.extend(opened.tokens[local].tolist())
        self.drop(sequence)
        self.drafting.commit(sequence, length, local + opened.start)
        self.recurrence.keep_checkpoint(sequence)

    # ----- the draft

    @property
    def drafts(self) -> bool:
        """Whether there is a draft now; `drafting.refusal` says why one that was wanted is not there."""
        return self.drafting.runs

    def propose(
        self, sequences: SequenceOf[Sequence], tokens: SequenceOf[int], depth: int, width: int,
        temperature: float = 1.0,
    ) -> Proposals | None:  # fmt: skip
        """What the draft finds best behind the pending tokens of sequences; see `Drafting.propose`."""
        for sequence in sequences:
            self._known(sequence)
        return self.drafting.propose(sequences, tokens, depth, width, temperature)

    # ----- slots

    def snapshot(
        self,
        number: int,
        sequence: Sequence,
        logits: npt.NDArray[np.float32] | None = None,
        length: int | None = None,
        tier: str = "device",
    ) -> Slot:
        """Keep the first `length` committed tokens (default: all) in a slot, with the logits that follow.

        tier: device, which shares the sequence's pages, or host, which copies them.

        Raises:
            ValueError: no slot of this number, or more tokens than there are.
            OutOfDeviceMemory: sites snapshot, slot_move; the slot holds what it held.
            OutOfHostMemory: no room in the host tier; the same.
        """
        slot = self.capture(sequence, None if tier == "host" else logits, length, borrow=tier == "host")
        if tier == "host":
            slot = self.host_tier.copy(slot, logits, keep=(number,))
        self.slots.put(number, slot)
        return slot

    def capture(
        self,
        sequence: Sequence,
        logits: npt.NDArray[np.float32] | None = None,
        length: int | None = None,
        kv_start: int | None = None,
        borrow: bool = False,
    ) -> Slot:
        """A snapshot of the first `length` committed tokens (or of those from kv_start on), in no slot.

        It has no references of its own to its pages: they live as long as the sequence's. `borrow`: nor a
        recurrent state of its own, but the sequence's, which its next commit changes.

        Raises:
            ValueError: more tokens than there are, or a length that cannot be resumed from.
            OutOfDeviceMemory: site snapshot.
        """
        self._known(sequence)
        length = len(sequence) if length is None else length
        if not (kv_start or 0) <= length <= len(sequence):
            raise ValueError(f"cannot keep {kv_start or 0}..{length} of {len(sequence)} tokens")
        with self.memory.site("snapshot"):
            state = self.recurrence.state_at(sequence, length, None if borrow else "snapshot")
            kept = None if logits is None else self.keep_logits(logits)
        pages = sequence.pages[(kv_start or 0) // PAGE : pages_for(length)]
        self.store.settle()
        draft = None if borrow or kv_start is not None else self.drafting.keep(sequence, length)
        return Slot(sequence.tokens[:length], tuple(pages), kept, kv_start, state=state, draft=draft)

    def keep_logits(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """A copy as a slot keeps it.

        Raises:
            OutOfDeviceMemory: at the current site.
        """
        return self.backend.keep_logits(logits)

    def restore(self, number: int, length: int | None = None) -> Sequence:
        """A new sequence with the first `length` tokens of a slot (default: all), brought back to the device.

        Raises:
            KeyError: the slot is empty.
            OutOfDeviceMemory: sites restore, slot_move; the slot is as it was.
        """
        return self.restore_chain([number], lambda: self.slots[number], length)

    def restore_chain(
        self, numbers: SequenceOf[int], whole: Callable[[], Slot], length: int | None = None
    ) -> Sequence:
        """As `restore`, of what several slots hold together: `whole` says it when all are in the device."""
        with self.memory.site("restore"):
            for number in numbers:
                self.host_tier.promote(number)
                self.slots.touch(number)
            return self.fork(whole(), length)

    def free_slot(self, number: int) -> bool:
        """Empty a slot; whether it held something."""
        return self.slots.free(number)

    # ----- memory

    def compact(self) -> int:
        """Release all that can be: move pages together, drop what is kept to be faster, and trim.

        Returns the bytes released.

        Pages that somebody else holds, who reads or writes a file, stay where they are.
        """
        owners = [*(sequence.pages for sequence in self._sequences), *(s.pages for s in self.slots.values())]
        for sequence in self._sequences:
            sequence.checkpoints = {}
            self.drafting.forget(sequence)
        for slot in self.slots.values():
            slot.draft = None
        moves = self.store.compact(self.store.pages.owners_beside(owners))
        if moves:
            for sequence in self._sequences:
                sequence.pages = [moves.get(page, page) for page in sequence.pages]
            self.slots.follow(moves)
        return self.memory.retire() + self.trim()

    def trim(self) -> int:
        """Give back segments without a used page and all cached blocks. Returns the bytes released."""
        self.store.trim()
        self.drafting.trim()
        return self.memory.trim()

    def memory_report(self) -> dict[str, Any]:
        """Bytes: total, free, cached, live by tag; pages: in use, free, tokens and bytes of each."""
        return self.store.report()

    # ----- inside

    def _compute(self, rows: Rows, kind: Kind, interrupt: Interrupt | None) -> Outputs:
        if kind is Kind.STEP:
            with self.memory.site("decode" if len(rows) == len(rows.sequences) else "verify"):
                self._make_writable(rows)
                self.recurrence.open(rows, kind)
                return self._runner.step(rows, interrupt)
        with self.memory.site("prefill_build"):
            self._make_writable(rows)
            self.recurrence.open(rows, kind)
            self._runner.reserve(rows)
        with self.memory.site("prefill_embed"):
            x = self._runner.embed(rows)
        with self.memory.site("prefill_compute"):
            return self._runner.prompt(rows, x, interrupt)

    def _make_writable(self, rows: Rows) -> None:
        for sequence, n in zip(rows.sequences, row_counts(rows), strict=True):
            make_writable(self.store, sequence.pages, len(sequence), len(sequence) + n)

    def _move(self, sequence: Sequence, local: npt.NDArray[np.int64]) -> None:
        length = len(sequence)
        moved = [(row, i) for i, row in enumerate(local.tolist()) if row != i]
        if moved:
            self.store.move(
                [place_of(sequence.pages, length + row) for row, _ in moved],
                [place_of(sequence.pages, length + i) for _, i in moved],
            )

    def _known(self, sequence: Sequence) -> None:
        if sequence not in self._sequences:
            raise ValueError("not an open sequence of this engine")
