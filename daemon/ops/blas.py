"""The threads of the BLAS under NumPy, set anew for every call of the engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import ThreadpoolController

from slotd.daemon.ops.thread_choice import ThreadChoice


class BlasThreads:
    """Times calls and gives the next one of its kind all threads or one.

    Args:
        adapt: False leaves the number of threads as it is. The number decides how a product is split and
            so its last bits: where bits are promised it must not change.
    """

    def __init__(self, adapt: bool) -> None:
        self._libraries = ThreadpoolController().select(user_api="blas").lib_controllers if adapt else []
        self._all = max((library.get_num_threads() for library in self._libraries), default=1)
        self._choices: dict[tuple[str, int], ThreadChoice] = {}

    @contextmanager
    def call(self, kind: str, n_rows: int) -> Iterator[None]:
        """Around a call over `n_rows` rows; calls of a kind and about as many rows are compared."""
        if self._all == 1:
            yield
            return
        choice = self._choices.setdefault((kind, n_rows.bit_length()), ThreadChoice())
        for library in self._libraries:
            library.set_num_threads(self._all if choice.all_threads else 1)
        began = time.perf_counter()
        yield
        choice.observe((time.perf_counter() - began) / n_rows)
