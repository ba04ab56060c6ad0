"""A prompt on its way through the scheduler."""

from __future__ import annotations

import enum
import secrets
from array import array
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from slotd.daemon.account import Account
from slotd.daemon.drafts import Drafts
from slotd.daemon.kv.pages import PAGE
from slotd.daemon.kv.slots import Slot
from slotd.daemon.link import Key, Submit
from slotd.daemon.memory.trim_interval import TrimInterval
from slotd.daemon.sampling import Sampler
from slotd.daemon.sequence import Sequence
from slotd.protocol.errors import Value
from slotd.protocol.messages import Prompt, Restore

#: A seed that nobody gave is drawn with so many bits: a JSON reader that has doubles only keeps it exact.
DRAWN_SEED_BITS = 53


class Phase(enum.Enum):
    """Where a job stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"


class Job:
    """One prompt: what was asked, how far it is, and what it produced.

    Args:
        submit: the front's message; its command is a Prompt or Restore with checked fields.
        max_ctx: positions a sequence may have.
        eos_ids: ids at which the model ends a text.
        clock: seconds, monotonic, the clock of `submit.submitted_at`.
        trim_tokens: give cached blocks back each time so many prompt tokens were computed; 0 = never.
    """

    def __init__(
        self, submit: Submit, max_ctx: int, eos_ids: frozenset[int], clock: Callable[[], float],
        trim_tokens: int = 0,
    ) -> None:  # fmt: skip
        assert isinstance(submit.command, Prompt)
        assert submit.ids is not None
        self.key: Key = submit.key
        self.command: Prompt = submit.command
        self.ids: npt.NDArray[np.int32] = submit.ids
        self.flags = submit.flags
        self.account = Account(clock, submit.submitted_at)
        self.phase = Phase.WAITING
        self.sequence: Sequence | None = None
        self.reused = 0
        self.n_gen = min(self.command.n_gen, max_ctx - len(self.ids))
        self.produced: list[int] = []
        self.drafts = Drafts()
        self.history: array[int] = array("i", self.ids.tobytes())
        seed = self.command.sampling.seed
        self.seed = secrets.randbits(DRAWN_SEED_BITS) if seed is None else seed
        self.sampler = Sampler(self.command.sampling, self.seed)
        self.stop_ids = frozenset(self.command.stop) | (frozenset() if self.command.ignore_eos else eos_ids)
        self.snap_done = self.command.snap is None
        self.pinned: list[Slot] = []  # slots this request has acknowledged, or starts from
        self.trims = TrimInterval(trim_tokens)
        self.from_slot = False  # it starts with what a slot holds, not with more of an ended sequence
        self.fetching = False  # a slot that it starts from is being read from disk
        self.fetch_failure: Exception | None = None
        self.restored_logits: npt.NDArray[np.float32] | None = None  # when a slot held the whole prompt

    @property
    def running_sequence(self) -> Sequence:
        """The sequence of a job that was admitted."""
        assert self.sequence is not None
        return self.sequence

    @property
    def restore_slot(self) -> int | None:
        """The slot this job starts from, None for a bare prompt."""
        return self.command.slot if isinstance(self.command, Restore) else None

    @property
    def prefilled(self) -> int:
        """Prompt tokens that are in the cache."""
        return 0 if self.sequence is None else min(len(self.sequence), len(self.ids))

    def piece_end(self, size: int, whole_pages: bool) -> int:
        """Where the next piece stops: at the snapshot, the prompt's end, or a page edge within the limit.

        size: most tokens of it; whole_pages: it ends at a page edge, and is one page at least.
        """
        start = self.prefilled
        end = start + max(size, 1)
        if whole_pages:
            end = max(end // PAGE, start // PAGE + 1) * PAGE
        end = min(end, len(self.ids))
        if not self.snap_done and self.command.snap is not None and start < self.command.snap.at < end:
            end = self.command.snap.at
        return end

    def banned_at(self, n: int) -> frozenset[int]:
        """Ids that may not be the n-th token, from 0: nothing ends the answer before min_tokens."""
        return self.stop_ids if n < self.command.min_tokens else frozenset()

    def fetched(self, failure: Exception | None) -> None:
        """Reading its slot has ended; `failure` is raised when the job is started again."""
        self.fetching, self.fetch_failure = False, failure
        self.account.enter("queue")

    def raise_failure(self) -> None:
        """Raise what went wrong with its slot, once."""
        failure, self.fetch_failure = self.fetch_failure, None
        if failure is not None:
            raise failure

    def take(self, token: int) -> None:
        """One more generated token."""
        self.produced.append(token)
        self.history.append(token)

    @property
    def remaining(self) -> int:
        """Tokens that the answer may still get."""
        return self.n_gen - len(self.produced)

    def ends_with(self, token: int, n: int) -> bool:
        """Whether `token` ends the answer when it is the n-th of it, from 1."""
        return token in self.stop_ids or n >= self.n_gen

    def ending(self) -> tuple[str, dict[str, Value]] | None:
        """(status, reason field) when the last token ended the answer, else None."""
        if self.produced and self.produced[-1] in self.stop_ids:
            return "stop", {"stop": self.produced[-1]}
        if len(self.produced) >= self.n_gen:
            return "length", {"limit": "n_gen" if self.n_gen == self.command.n_gen else "max_ctx"}
        return None

    def summary(self, epoch: int) -> dict[str, Value]:
        """Counts, epoch, seed, time account and drafts of this job's [done] line, in wire order."""
        return {
            "prompt": len(self.ids), "reused": self.reused, "gen": len(self.produced),
            "epoch": epoch, "seed": self.seed, **self.account.close(), **self.drafts.report(),
        }  # fmt: skip

    def report(self) -> dict[str, object]:
        """How far it is, for STATUS."""
        return {
            "id": self.key if isinstance(self.key, str) else None, "phase": self.phase.value,
            "prompt": len(self.ids), "at": self.prefilled, "reused": self.reused, "gen": len(self.produced),
            **self.drafts.report(),
        }  # fmt: skip
