"""The device, or the context on it, is gone: nothing of this process can be computed any more."""

from __future__ import annotations


class DeviceLost(BaseException):
    """Raised for an error that sticks: every later call to the device would fail too.

    Not an `Exception`, so that no handler of a request's failure takes it for one. It ends the engine side:
    as a child process that is replaced, as a thread together with the daemon.

    Args:
        reason: what the device said.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)
