"""The engine's rules for a draft: what it knows of each sequence, and that everything goes on without it.

The draft's context of a sequence is the stretch of committed positions start .. length-1 whose features it
has taken in, as keys and values in pages of its own: position p lies at place p - start. It grows with each
commit; in front it is cut page by page so that no more than a window remains. It follows forks, truncations
and slots in the device; a slot that went elsewhere comes back without, and the context then starts with what
is committed next. The same happens when memory runs out in anything of the draft.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.daemon.backend import Backend, DraftRunner, Runner
from slotd.daemon.draft_rows import ContextRows, DraftBlock, Proposals
from slotd.daemon.kv.page_storage import PageStorage
from slotd.daemon.kv.page_tables import make_writable
from slotd.daemon.kv.pages import PAGE, pages_for
from slotd.daemon.kv.slots import Slot
from slotd.daemon.memory import OutOfDeviceMemory
from slotd.daemon.sequence import Sequence
from slotd.daemon.weights.architectures import HyperParameters
from slotd.daemon.weights.draft_file import DraftFile, check_fit, open_draft
from slotd.protocol.errors import ModelError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class DraftContext:
    """Of a sequence.

    Attributes:
        start: first position that is known.
        end: the position behind the last one.
        pages: position p lies at place p - start.
        waiting: features of the positions from `end` on, which nobody has needed yet.
    """

    start: int
    end: int
    pages: list[int]
    waiting: list[Any]

    @property
    def n_waiting(self) -> int:
        """Positions that wait."""
        return sum(map(len, self.waiting))


@dataclass(frozen=True, slots=True, weakref_slot=True)
class KeptContext:
    """Of a slot; its pages are let go when nobody holds it any more."""

    start: int
    end: int
    pages: tuple[int, ...]
    waiting: tuple[Any, ...]

    @property
    def n_waiting(self) -> int:
        """Positions that wait."""
        return sum(map(len, self.waiting))


class Drafting:
    """The draft of an engine.

    Args:
        backend: computes it.
        path: its file; None: there is none.
        target: hyper-parameters of the target.
        max_ctx: most positions of a sequence.
        window: positions of a context that are kept, at least; up to a page more are.

    Attributes:
        path: as given.
        refusal: why there is no draft though there is a file; None: there is one, or none was wanted.
        parked: whether it stays away when the target is loaded.
    """

    def __init__(
        self, backend: Backend, path: Path | None, target: HyperParameters, max_ctx: int, window: int
    ) -> None:
        self.refusal: str | None = None
        self.parked = False
        self._backend, self._memory, self.path = backend, backend.memory, path
        self._target, self._max_ctx, self._window = target, max_ctx, window
        self._identity: str | None = None
        self._store: PageStorage | None = None
        self._runner: DraftRunner | None = None
        self._beside: Runner | None = None  # the target, while it is loaded
        # Pages of slots that are gone. Another thread may have held the last reference to one.
        self._left: deque[tuple[int, ...]] = deque()

    @property
    def runs(self) -> bool:
        """Whether the draft is loaded."""
        return self._runner is not None

    @property
    def block_size(self) -> int:
        """A pending token and the positions behind it that the draft was made to predict; 0 without one."""
        return 0 if self._runner is None else self._runner.block_size

    # ----- the weights

    def load(self, runner: Runner) -> None:
        """Load the draft for a target that was just loaded, at site draft_load.

        Where that cannot be, `refusal` says why, and there is none.
        """
        self._beside = runner
        if self.path is None or self.parked:
            return
        try:
            with self._memory.site("draft_load"), open_draft(self.path) as file:
                self._load(file, runner)
            self.refusal = None
        except (ModelError, OutOfDeviceMemory) as error:
            self.refusal = str(error)
            log.warning("there is no draft: %s", error)

    def _load(self, file: DraftFile, runner: Runner) -> None:
        check_fit(file, self._target)
        if self._identity not in (None, file.identity):
            raise ModelError(f"{file.path}: the file has changed since the daemon started")
        if self._store is None:
            self._store = self._backend.draft_store(file.parameters)
        self._runner = self._backend.load_draft(file, runner, self._store, self._max_ctx)
        self._identity = file.identity

    def unload(self) -> None:
        """Let the weights go, with the target's. Contexts stay."""
        self._finish()
        self._runner = self._beside = None

    def _finish(self) -> None:
        """What the draft has taken of contexts is in their pages before it goes."""
        if self._runner is not None:
            self._runner.finish()

    def park(self) -> bool:
        """Give the memory of the weights back, until `unpark`. Whether there were any."""
        self.parked = True
        if self._runner is None or self._beside is None:
            return False
        self._finish()
        self._beside.forget_draft()
        self._runner = None
        self._memory.retire()
        self._memory.trim()
        return True

    def unpark(self) -> bool:
        """Load the draft again; whether it came. Without its target it comes with that one."""
        self.parked = False
        if self._runner is None and self._beside is not None:
            self.load(self._beside)
            return self.runs
        return False

    def give_up(self, reason: str) -> None:
        """As `park`, for good."""
        self.park()
        self.path, self.refusal = None, reason
        log.warning("there is no draft: %s", reason)

    # ----- sequences

    def commit(self, sequence: Sequence, length: int, rows: npt.NDArray[np.int64]) -> None:
        """Rows of the target's last call were committed behind `length` tokens: they become context."""
        if self._runner is None or self._store is None or not len(rows):
            return
        try:
            with self._memory.within("draft"):
                self._extend(self._runner, self._store, sequence, length, rows)
        except OutOfDeviceMemory as error:
            log.warning("the draft forgets a sequence: %s", error)
            self.forget(sequence)

    def _extend(
        self, runner: DraftRunner, store: PageStorage, sequence: Sequence, length: int,
        rows: npt.NDArray[np.int64],
    ) -> None:  # fmt: skip
        context = self._context(sequence, length)
        if context.n_waiting + len(rows) <= runner.puts_off:
            context.waiting.append(runner.take(rows))
            return
        self._settle(runner, store, context)
        self._store_rows(runner, store, context, rows, ())

    def _settle(self, runner: DraftRunner, store: PageStorage, context: DraftContext) -> None:
        """Compute what waits."""
        if context.waiting:
            rows = np.arange(context.n_waiting)
            self._store_rows(runner, store, context, rows, tuple(context.waiting))
            context.waiting.clear()

    def _store_rows(
        self, runner: DraftRunner, store: PageStorage, context: DraftContext, rows: npt.NDArray[np.int64],
        features: tuple[Any, ...],
    ) -> None:  # fmt: skip
        """Rows behind the end of a context become part of it, without those in front of its window."""
        self._release_left()
        end = context.end + len(rows)
        self._cut_front(store, context, end - self._window)
        skipped = max(0, context.start - context.end)
        position = context.end + skipped
        place = position - context.start
        make_writable(store, context.pages, place, end - context.start)
        features = tuple(_behind(features, skipped))
        runner.extend_context(ContextRows(context.pages, place, position, rows[skipped:], features))
        context.end = end

    def _context(self, sequence: Sequence, length: int) -> DraftContext:
        """The context of a sequence of this length; a new one where it has none that reaches so far."""
        context = sequence.draft
        if context is not None and context.end + context.n_waiting == length:
            found: DraftContext = context
            return found
        self.forget(sequence)
        sequence.draft = context = DraftContext(length, length, [], [])
        return context

    def _cut_front(self, store: PageStorage, context: DraftContext, least: int) -> None:
        """Let pages go whose positions are all below `least`."""
        n = (least - context.start) // PAGE
        if n > 0:
            store.pages.release(context.pages[:n])
            del context.pages[:n]
            context.start += n * PAGE

    def truncate(self, sequence: Sequence, length: int) -> None:
        """The sequence has `length` tokens now and no room reserved."""
        context = sequence.draft
        if context is None or self._store is None:
            return
        if length <= context.start:
            self.forget(sequence)
            return
        context.waiting = list(_before(context.waiting, length - context.end))
        context.end = min(context.end, length)
        keep = pages_for(context.end - context.start)
        self._store.pages.release(context.pages[keep:])
        del context.pages[keep:]

    def fork(self, source: Sequence | Slot, length: int, sequence: Sequence) -> None:
        """A new sequence has the first `length` tokens of another one, or of a slot."""
        kept = self._shared(source, length)
        if kept is not None:
            sequence.draft = DraftContext(kept.start, kept.end, list(kept.pages), list(kept.waiting))

    def keep(self, sequence: Sequence, length: int) -> KeptContext | None:
        """What a slot of the first `length` tokens keeps of the context."""
        kept = self._shared(sequence, length)
        if kept is not None:
            weakref.finalize(kept, self._left.append, kept.pages).atexit = False
        return kept

    def _shared(self, source: Sequence | Slot, length: int) -> KeptContext | None:
        context = source.draft
        if context is None or self._store is None:
            return None
        if not context.start < length <= context.end + context.n_waiting:
            return None
        end = min(context.end, length)
        pages = tuple(context.pages[: pages_for(end - context.start)])
        self._store.pages.share(pages)
        return KeptContext(context.start, end, pages, tuple(_before(context.waiting, length - end)))

    def forget(self, sequence: Sequence) -> None:
        """The context of a sequence goes."""
        if sequence.draft is not None and self._store is not None:
            self._store.pages.release(sequence.draft.pages)
        sequence.draft = None

    def trim(self) -> None:
        """Give back what no context is in."""
        if self._store is not None:
            self._release_left()
            self._store.trim()

    def _release_left(self) -> None:
        while self._left and self._store is not None:
            self._store.pages.release(self._left.popleft())

    # ----- proposals

    def propose(
        self, sequences: SequenceOf[Sequence], tokens: SequenceOf[int], depth: int, width: int,
        temperature: float = 1.0,
    ) -> Proposals | None:  # fmt: skip
        """What the draft finds best for the `depth` positions behind the pending tokens of sequences.

        None: there is no draft, or no memory for it (site draft); it has forgotten these sequences then.

        Args:
            tokens: of each sequence the one that is chosen and not computed yet.
            depth: at least 1, below `block_size`. A draft that says itself that it does not know so much
                gives fewer positions.
            width: how many tokens of each position.
            temperature: what logits are divided by before their probabilities are worked out.
        """
        runner, store = self._runner, self._store
        if runner is None or store is None:
            return None
        if not 1 <= depth < runner.block_size:
            raise ValueError(f"a depth of {depth} with blocks of {runner.block_size}")
        try:
            with self._memory.site("draft"):
                blocks = [
                    self._block(runner, store, sequence, token, depth)
                    for sequence, token in zip(sequences, tokens, strict=True)
                ]
                return runner.propose(blocks, depth, width, temperature)
        except OutOfDeviceMemory as error:
            log.warning("no draft for this step: %s", error)
            for sequence in sequences:
                self.forget(sequence)
            return None

    def _block(
        self, runner: DraftRunner, store: PageStorage, sequence: Sequence, token: int, depth: int
    ) -> DraftBlock:
        self._release_left()
        position = len(sequence)
        context = self._context(sequence, position)
        self._settle(runner, store, context)
        length = position - context.start
        make_writable(store, context.pages, length, length + depth + 1)
        return DraftBlock(context.pages, length, position, token)


def _before(features: Iterable[Any], n: int) -> Iterator[Any]:
    """Those of the first n rows."""
    for part in features:
        if n > 0:
            yield part[:n]
        n -= len(part)


def _behind(features: Iterable[Any], n: int) -> Iterator[Any]:
    """Those of all rows but the first n."""
    for part in features:
        if len(part) > n:
            yield part[max(n, 0) :]
        n -= len(part)
