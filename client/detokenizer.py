"""From a stream of token ids to text that can be shown: whole characters, nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

from slotd.protocol.errors import ConfigError


class TokenBytes(Protocol):
    """What a `Detokenizer` needs of a `Tokenizer`."""

    def token_bytes(self, id: int, *, special: bool = False) -> bytes: ...


class Detokenizer:
    """Incremental decoding. The pieces joined equal the text of all ids at once, however they are cut.

    Args:
        tokenizer: gives the bytes of a token.
        special: whether special tokens show as text; without it they give none.
    """

    def __init__(self, tokenizer: TokenBytes, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, ids: Iterable[int]) -> str:
        """Text that is certain after these ids.

        The bytes of an unfinished character wait for the next call; bytes that can no longer become one
        are U+FFFD. Raises what `token_bytes` raises; the state is then as before the call.
        """
        data = b"".join(self._tokenizer.token_bytes(id, special=self._special) for id in ids)
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left: U+FFFD for an unfinished character, else "". The next `add` begins a new text."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Lets text through until a stop string, holding back exactly what may turn out to be one.

    The match that begins first in the whole text wins, of several that begin there the longest; where the
    text is cut into pieces makes no difference. So a match that is a part of a longer possible one (stops
    ``"a"`` and ``"ab"``) is decided by the text after it, or by `finish`.

    Time is linear in the text whatever the stops are (Aho and Corasick, 1975): each node of the automaton
    is a prefix of some stop, the current node the longest one that the text ends with.

    Args:
        stops: any number of stop strings; none lets everything through.

    Attributes:
        stopped_by: the stop string that ended the text, or None.

    Raises:
        ConfigError: an empty stop string.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        # The stop that ends at a node: the longest that the node's text ends with, or None.
        self._ending: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._fail = [0] * len(self._children)  # the longest proper suffix that is a node too
        self._open = [0] * len(self._children)  # length of the longest suffix that can still grow
        self._link()

        self._node = 0
        self._held = ""
        self._match: tuple[int, str] | None = None  # (start in _held, stop): found, a better one possible
        self.stopped_by: str | None = None

    def add(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string once one is certain.

        After a stop every further call gives ``("", that stop)``.
        """
        if self.stopped_by is not None:
            return "", self.stopped_by
        buffer = self._held + text
        for end in range(len(self._held) + 1, len(buffer) + 1):
            self._step(buffer[end - 1], end)
            if self._match is not None and self._match[0] < end - self._open[self._node]:
                start, self.stopped_by = self._match
                return buffer[:start], self.stopped_by
        return self._release(buffer), None

    def finish(self) -> str:
        """No more text comes: the rest of it. A match that was still undecided sets `stopped_by` now."""
        if self.stopped_by is not None:
            return ""
        rest, self._held, self._node = self._held, "", 0
        if self._match is not None:
            start, self.stopped_by = self._match
            rest = rest[:start]
        return rest

    def _step(self, character: str, end: int) -> None:
        node = self._node
        while node and character not in self._children[node]:
            node = self._fail[node]
        self._node = node = self._children[node].get(character, 0)
        stop = self._ending[node]
        # At one end the longest stop begins first; a later end is better only from the same start.
        if stop is not None and (self._match is None or end - len(stop) <= self._match[0]):
            self._match = (end - len(stop), stop)

    def _release(self, buffer: str) -> str:
        held_from = len(buffer) - self._open[self._node]
        if self._match is not None:  # undecided, so it begins in what is held
            self._match = (self._match[0] - held_from, self._match[1])
        self._held = buffer[held_from:]
        return buffer[:held_from]

    # ----- building the automaton

    def _insert(self, stop: str) -> None:
        if not stop:
            raise ConfigError("a stop string is empty")
        node = 0
        for character in stop:
            child = self._children[node].get(character)
            if child is None:
                child = len(self._children)
                self._children[node][character] = child
                self._children.append({})
                self._depth.append(self._depth[node] + 1)
                self._ending.append(None)
            node = child
        self._ending[node] = stop

    def _link(self) -> None:
        nodes = list(self._children[0].values())
        for node in nodes:  # grows while it is read: breadth first, so that shorter suffixes are ready
            fail = self._fail[node]
            self._open[node] = self._depth[node] if self._children[node] else self._open[fail]
            if self._ending[node] is None:
                self._ending[node] = self._ending[fail]
            for character, child in self._children[node].items():
                suffix = fail
                while suffix and character not in self._children[suffix]:
                    suffix = self._fail[suffix]
                self._fail[child] = self._children[suffix].get(character, 0)
                nodes.append(child)
