"""Inline snapshots: `snap=AT:SLOT` of a prompt, taken as soon as its tokens are computed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from slotd.daemon.disk_commands import DiskCommands
from slotd.daemon.engine import Engine
from slotd.daemon.job import Job
from slotd.daemon.kv.host_tier import OutOfHostMemory
from slotd.daemon.kv.slots import Slot
from slotd.daemon.link import Line, ToFront
from slotd.daemon.memory import OutOfDeviceMemory
from slotd.daemon.memory.pressure import Extent
from slotd.daemon.recovery import Recovery
from slotd.daemon.slot_chains import free_for
from slotd.protocol.messages import Snap, SnapInline, SnapInlineFailed

Logits = npt.NDArray[np.float32]


class InlineSnapshots:
    """Takes them and says so.

    Args:
        engine: owns the slots.
        recovery: makes room.
        disk: saves those for the disk tier, and answers for them.
        deliver: takes the lines.
    """

    def __init__(
        self, engine: Engine, recovery: Recovery, disk: DiskCommands, deliver: Callable[[ToFront], None]
    ) -> None:
        self._engine = engine
        self._recovery = recovery
        self._disk = disk
        self._deliver = deliver

    def take(self, job: Job, logits: Logits | None) -> None:
        """Take the job's snapshot if its tokens are there and it was not taken. It may cost itself only.

        logits: those behind the last computed token, when they are known.
        """
        snap = job.command.snap
        if job.snap_done or snap is None or job.sequence is None or len(job.sequence) < snap.at:
            return
        job.snap_done = True
        failed = None
        try:
            with job.account.inside("snapshot"):
                if not free_for(self._engine.slots, snap.slot, "thick"):
                    failed = "bad_slot"
                elif self._engine.recurrence.resumable(job.sequence, snap.at) != snap.at:
                    failed = "no_state"  # the request started behind it
                else:
                    slot = self._keep(job, snap, logits if snap.at == len(job.sequence) else None)
        except OutOfDeviceMemory:
            failed = "oom"
        except OutOfHostMemory:
            failed = "host_full"
        if failed is not None:
            self._deliver(Line(SnapInlineFailed(slot=snap.slot, reason=failed), job.key))
        elif job.command.tier == "disk":
            self._disk.save_inline(job.key, snap.slot, slot)
        else:
            event = SnapInline(slot=snap.slot, cur_pos=snap.at, tier=job.command.tier)
            self._deliver(Line(event, job.key))

    def _keep(self, job: Job, snap: Snap, logits: Logits | None) -> Slot:
        sequence, tier = job.running_sequence, "host" if job.command.tier == "host" else "device"
        # A snapshot can be done without: no other slot is freed for it.
        slot = self._recovery.attempt(
            lambda: self._engine.snapshot(snap.slot, sequence, logits, snap.at, tier),
            job.account, job.pinned, extent=Extent.LOSSLESS,
        )  # fmt: skip
        job.pinned.append(slot)
        return slot
