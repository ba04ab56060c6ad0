"""Logging goes to stderr, and nothing but protocol lines ever reaches stdout."""

from __future__ import annotations

import fcntl
import logging
import os
import sys

from slotd.protocol.errors import ConfigError

#: By verbosity: the default, -v, -vv.
LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


def setup_logging(verbosity: int) -> None:
    """One handler on stderr: warnings by default, -v info, -vv debug."""
    level = LEVELS[min(verbosity, 2)]
    logging.basicConfig(
        stream=sys.stderr, level=level, format="slotd[%(process)d] %(levelname)s %(name)s: %(message)s"
    )
    logging.captureWarnings(True)


def verbosity() -> int:
    """What `setup_logging` was called with, 0 when it was not."""
    level = logging.getLogger().level
    return LEVELS.index(level) if level in LEVELS else 0


def fill_standard_descriptors() -> None:
    """Open /dev/null where 0, 1 or 2 is closed, so that nothing of ours gets that number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one


def check_descriptor(descriptor: int) -> None:
    """Raises ConfigError unless the token stream's descriptor was inherited and can be written to."""
    try:
        writable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        reason = "it cannot be written to"
    except OSError as error:
        writable, reason = False, str(error.strerror)
    if not writable:
        raise ConfigError(f"--stream-fd {descriptor}: {reason}; it must be inherited and open")


def guard_stdout() -> int:
    """Move the real stdout to a private descriptor and point descriptor 1 at stderr.

    A print from Python, a C library or a driver can then not break the line protocol.

    Returns:
        The private descriptor that protocol lines are written to.
    """
    if sys.stdout is not None:
        sys.stdout.flush()
    private = os.dup(1)
    os.set_inheritable(private, False)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return private
