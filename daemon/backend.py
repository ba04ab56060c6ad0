"""What the engine needs of a backend: memory, pages, and a loaded model that computes rows.

The engine knows rows, sequences and pages; how a call is computed, and where its results lie, is behind
these interfaces. A backend is one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from slotd.daemon.candidates import Candidates, View
from slotd.daemon.draft_rows import ContextRows, DraftBlock, Proposals
from slotd.daemon.kv.page_storage import PageStorage
from slotd.daemon.kv.recurrent_storage import RecurrentStorage
from slotd.daemon.memory import Ledger
from slotd.daemon.models.model import Interrupt
from slotd.daemon.ops.interface import Ops
from slotd.daemon.rows import Rows
from slotd.daemon.weights.architectures import HyperParameters
from slotd.daemon.weights.draft_file import DraftFile, DraftParameters
from slotd.daemon.weights.reader import ModelFile

Logits = npt.NDArray[np.float32]


class Outputs(Protocol):
    """What a forward returns, for each row of the call that wanted logits, in call order.

    May be a view of the device's buffers: what was not asked for is gone with the next call of the engine.
    """

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """int64 [m], index of these rows in the call."""
        ...

    @property
    def logits(self) -> Logits:
        """float32 [m, n_vocab] in host memory; may have to be fetched, the first time."""
        ...

    def row(self, index: int) -> Logits:
        """float32 [n_vocab], one row of `logits`, and no more than that is fetched. Read only."""
        ...

    @property
    def at_hand(self) -> bool:
        """Whether the logits lie in host memory: then nothing is won by asking for candidates."""
        ...

    def candidates(self, views: SequenceOf[View]) -> list[Candidates | None]:
        """What the device finds best in each view, without the logits on their way to the host.

        None where it gives no answer and the row has to be read: values that are not finite, too many that
        are equal, too many adjustments. Whether it does depends on the row and the view alone, but for want
        of device memory.
        """
        ...

    def greedy(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """(ids, finite), int32 [m], bool [m]: id of the highest logit, the lowest of equals; is it finite?

        Not finite: a NaN or +inf is among the logits, or nothing but -inf; the id means nothing then.
        """
        ...


class HostOutputs:
    """Outputs in ordinary memory.

    Args:
        logits: float32 [m, n_vocab].
        rows: int64 [m].
    """

    at_hand = True

    def __init__(self, logits: Logits, rows: npt.NDArray[np.int64]) -> None:
        self.logits = logits
        self.rows = rows

    def greedy(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        ids = np.argmax(self.logits, axis=1)  # the first of equals; stops at a NaN
        return ids.astype(np.int32), np.isfinite(self.logits[np.arange(len(ids)), ids])

    def row(self, index: int) -> Logits:
        found: Logits = self.logits[index]
        return found

    def candidates(self, views: SequenceOf[View]) -> list[Candidates | None]:
        return [None] * len(views)


class Runner(Protocol):
    """A loaded model. It holds the weights: when it goes, their memory does.

    Every method may raise OutOfDeviceMemory. The pages of all rows are there and private to their sequence.
    """

    def reserve(self, rows: Rows) -> None:
        """Make sure of scratch for a prompt call, so that a shortage is met before the embedding."""
        ...

    def embed(self, rows: Rows) -> Any:
        """The residual stream of a prompt call before the first layer, for `prompt`."""
        ...

    def prompt(self, rows: Rows, x: Any, interrupt: Interrupt | None) -> Outputs:
        """Compute a prompt call.

        Raises:
            Interrupted: interrupt(), which is asked between layers, said so.
        """
        ...

    def step(self, rows: Rows, interrupt: Interrupt | None) -> Outputs:
        """Compute a step call of at most 64 rows, which need not ask `interrupt`."""
        ...

    def forget_draft(self) -> None:
        """Calls keep nothing for a draft any more: there is none."""
        ...


class DraftRunner(Protocol):
    """A loaded draft on its target's runner, whose calls keep their features until `forget_draft`.

    It holds its weights. Every method may raise OutOfDeviceMemory.
    """

    @property
    def block_size(self) -> int:
        """A pending token and the positions behind it that it was made to predict."""
        ...

    @property
    def puts_off(self) -> int:
        """Rows of a sequence that may wait with their features, because many at once cost less; 0: none."""
        ...

    def take(self, rows: npt.NDArray[np.int64]) -> Any:
        """The features of rows of the target's last call, [m, numbers of each], to be kept for later."""
        ...

    def extend_context(self, rows: ContextRows) -> None:
        """Take committed rows into the context of their sequence."""
        ...

    def finish(self) -> None:
        """Have all that was taken in the pages, if it is not."""
        ...

    def propose(
        self, blocks: SequenceOf[DraftBlock], depth: int, width: int, temperature: float
    ) -> Proposals:
        """The `width` best tokens for each of the next `depth` positions behind each block's token.

        For fewer positions where the draft itself says that it does not know more.

        temperature: what logits are divided by before their probabilities are worked out.
        """
        ...


class Backend(Protocol):
    """One device and the way to compute on it.

    Attributes:
        name: numpy or cuda.
        math: how numbers are computed, as a slot's identity records it.
        memory: the ledger of the device.
        ops: what models are written with.
        kv_type: the default type of K and V.
        chunk: the default length of a prefill piece, tokens.
        logits_on_device: whether `keep_logits` takes device memory.
    """

    @property
    def name(self) -> str: ...
    @property
    def math(self) -> str: ...
    @property
    def memory(self) -> Ledger: ...
    @property
    def ops(self) -> Ops: ...
    @property
    def kv_type(self) -> str: ...
    @property
    def chunk(self) -> int: ...
    @property
    def logits_on_device(self) -> bool: ...

    def page_store(self, hyper: HyperParameters, k_type: str, v_type: str) -> PageStorage:
        """An empty store for a model's K and V."""
        ...

    def recurrent_store(self, hyper: HyperParameters) -> RecurrentStorage | None:
        """A store for the states of a model's recurrent layers; None: it has none."""
        ...

    def load_model(self, file: ModelFile, store: PageStorage, max_ctx: int) -> Runner:
        """Read the weights; rows are computed on the pages of `store`.

        Raises:
            ModelError: no code for the architecture, or for the type of a tensor.
            ConfigError: a promise that this machine cannot keep.
            OutOfDeviceMemory: they do not fit.
        """
        ...

    def draft_store(self, draft: DraftParameters) -> PageStorage:
        """An empty store for the context of a draft.

        Raises:
            ModelError: its heads cannot be computed here.
        """
        ...

    def load_draft(self, file: DraftFile, target: Runner, store: PageStorage, max_ctx: int) -> DraftRunner:
        """Read the weights of a draft that fits the target; from now on calls of `target` keep features.

        Raises:
            ModelError: as `load_model`.
            OutOfDeviceMemory: they do not fit.
        """
        ...

    def keep_logits(self, logits: Logits) -> Logits:
        """A copy of logits that a slot keeps, readable on the host.

        Raises:
            OutOfDeviceMemory: at the current site.
        """
        ...

    def report(self) -> Mapping[str, Any]:
        """What PROPS says of it."""
        ...
