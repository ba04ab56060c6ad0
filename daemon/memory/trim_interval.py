"""When a long prefill gives cached pool blocks back (`--prefill-pool-trim-tokens`)."""

from __future__ import annotations


class TrimInterval:
    """Counts the prefilled tokens of one request since its last trim.

    Args:
        tokens: trim when so many tokens or more were prefilled; 0 = never.
    """

    __slots__ = ("_since", "_tokens")

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._since = 0

    def completed(self, n: int) -> bool:
        """A piece of n tokens is committed: whether to trim now."""
        self._since += n
        if not self._tokens or self._since < self._tokens:
            return False
        self._since = 0
        return True
