"""What every ledger of device memory is: sites, tags, one failure, and what the engine asks of it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from slotd.daemon.memory.device_lost import DeviceLost
from slotd.protocol.errors import SlotdError

if TYPE_CHECKING:
    from slotd.daemon.memory.faults import Faults

FLOAT32 = np.dtype(np.float32)

#: What keeps freed blocks: a pool of blocks by size, or the driver's virtual memory, which needs no trim.
PoolKind = Literal["legacy", "vmm"]

#: What an allocation may be for.
TAGS = ("weights", "draft", "drafter", "kv", "state", "snapshot", "scratch")

#: Named places where memory can run out (design section 4); `SLOTD_FAULT` takes these names.
SITES = (
    "prefill_reserve",
    "prefill_embed",
    "prefill_build",
    "prefill_compute",
    "commit",
    "decode",
    "draft",
    "verify",
    "snapshot",
    "restore",
    "slot_move",
    "draft_load",
    "drafter_load",
    "score",
)

#: A site that no memory runs out at: passing it may find the device gone.
DEVICE_LOST = "device_lost"

#: The site outside all named ones: loading the model.
START = "start"


class OutOfDeviceMemory(SlotdError):
    """An allocation failed. Cached blocks may be the cause: the pool never releases them by itself.

    Attributes:
        site: where it happened, one of SITES or START.
        requested: bytes asked for (0 when the failure was injected).
        free: bytes that were left beside live and cached blocks.
    """

    def __init__(self, site: str, requested: int, free: int) -> None:
        self.site = site
        self.requested = requested
        self.free = free
        super().__init__(f"out of device memory: site={site} requested={requested} free={free}")

    def bare(self) -> OutOfDeviceMemory:
        """The same failure without its traceback, whose frames hold the arrays of the step that failed."""
        return OutOfDeviceMemory(self.site, self.requested, self.free)


class Ledger(ABC):
    """Owner of all arrays of the engine in the memory of one device. Thread-safe.

    An array carries its own life: when it and all its views are gone, its block is back in the pool.

    Args:
        limit: most bytes in live and cached blocks together; None = what the device has.
        faults: failures to inject when a site is passed.

    Attributes:
        limit: as given; may be changed at any time.
        pool_kind: what keeps freed blocks.
    """

    pool_kind: PoolKind = "legacy"

    def __init__(self, limit: int | None = None, faults: Faults | None = None) -> None:
        self.limit = limit
        self._faults = faults
        self._here = threading.local()

    # ----- sites

    def check_device(self) -> None:
        """Passed by each forward: the device is lost when `SLOTD_FAULT` says so."""
        if self._faults is not None and self._faults.hits(DEVICE_LOST):
            self._lose_device()

    def _lose_device(self) -> None:
        raise DeviceLost("injected by SLOTD_FAULT")

    @contextmanager
    def site(self, name: str) -> Iterator[None]:
        """Pass a named site: an injected fault is raised here, a failure inside names it.

        Raises:
            OutOfDeviceMemory: injected by `SLOTD_FAULT`.
            ValueError: not one of SITES.
        """
        if name not in SITES:
            raise ValueError(f"{name!r} is not a site")
        if self._faults is not None and self._faults.hits(name):
            raise OutOfDeviceMemory(name, 0, self.free)
        with self.within(name):
            yield

    @contextmanager
    def without_faults(self) -> Iterator[None]:
        """Nothing inside is counted or fails on purpose."""
        faults, self._faults = self._faults, None
        try:
            yield
        finally:
            self._faults = faults

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Name a failure inside after a site without passing it: no fault is injected or counted.

        Raises:
            ValueError: not one of SITES.
        """
        if name not in SITES:
            raise ValueError(f"{name!r} is not a site")
        outer = self.current_site
        self._here.site = name
        try:
            yield
        finally:
            self._here.site = outer

    @property
    def current_site(self) -> str:
        """The innermost site of this thread."""
        return getattr(self._here, "site", START)

    # ----- arrays

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike = FLOAT32, tag: str = "scratch") -> Any:
        """A new C-contiguous array of the device, aligned for its widest loads, contents undefined.

        Raises:
            OutOfDeviceMemory: over the limit, or the device has no more.
            KeyError: a tag that is not one of TAGS.
        """

    @abstractmethod
    def trim(self) -> int:
        """Release all cached blocks. Returns the bytes released."""

    def retire(self) -> int:
        """Release what is kept only to be faster and can be made again. Returns the bytes released."""
        return 0

    # ----- what there is, in bytes

    @abstractmethod
    def live(self, tag: str | None = None) -> int:
        """Bytes in use under a tag, or under all of them. Blocks count whole."""

    @property
    @abstractmethod
    def by_tag(self) -> Mapping[str, int]:
        """Bytes in use for each tag."""

    @property
    @abstractmethod
    def cached(self) -> int:
        """Bytes of freed blocks that the pool keeps."""

    @property
    @abstractmethod
    def total(self) -> int:
        """The limit, or the memory of the device."""

    @property
    @abstractmethod
    def free(self) -> int:
        """Bytes that may still be taken beside live and cached blocks."""

    @abstractmethod
    def room_for(self, n_bytes: int) -> int:
        """How many blocks of n_bytes could be taken now without a trim."""
