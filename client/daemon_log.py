"""The daemon's own words on stderr, for a person who runs a command and not a daemon."""

from __future__ import annotations

import re
import sys

_IMPORTANT = re.compile(r"slotd\[\d+\] (?:WARNING|ERROR|CRITICAL) \S+: (.+)")


def show_warning(line: str) -> None:
    """Pass a warning or error on to stderr. The rest is for -vv, and last words are part of an error."""
    found = _IMPORTANT.fullmatch(line)
    if found is not None:
        print(f"slotd: {found[1]}", file=sys.stderr, flush=True)
