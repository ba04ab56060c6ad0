"""Logging goes to stderr, and nothing but protocol lines ever reaches stdout."""

from __future__ import annotations

import logging
import os
import sys


def setup_logging(verbosity: int) -> None:
    """One handler on stderr: warnings by default, -v info, -vv debug."""
    level = [logging.WARNING, logging.INFO, logging.DEBUG][min(verbosity, 2)]
    logging.basicConfig(
        stream=sys.stderr, level=level, format="slotd[%(process)d] %(levelname)s %(name)s: %(message)s"
    )
    logging.captureWarnings(True)


def guard_stdout() -> int:
    """Move the real stdout to a private descriptor and point descriptor 1 at stderr.

    A print from Python, a C library or a driver can then not break the line protocol.

    Returns:
        The private descriptor that protocol lines are written to.
    """
    sys.stdout.flush()
    private = os.dup(1)
    os.set_inheritable(private, False)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return private
