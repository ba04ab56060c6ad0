"""Which entry gives its slot up, and which file goes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from slotd.client.cache_entries import WIDTH, FullEntry, PrefixEntry, is_prefix

#: Factors on the score of a full entry that the current prompt goes on from, by whether it was ever hit.
PREFIX_HIT, PREFIX_UNUSED = 0.25, 0.02


#: How much longer than a conversation that came back was away an entry may be idle and not count as ended.
PATIENCE = 2


def prefix_victim(
    entries: Collection[PrefixEntry], new: bytes, away: int | None = None
) -> PrefixEntry | None:
    """The entry to give up for one of the ids `new`, None when there is none.

    1. An ancestor of `new` that no other branch starts from: it helps only prompts that `new` helps more. Of
       several the one that adds least to the one below it (so the head of a chain, mostly a system prompt,
       stays), then the oldest.
    2. Else a leaf: an entry that is no strict prefix of another one, `new` included. The oldest of those
       whose conversation never came back, or that are idle for much longer than `new` was away. When there
       are none, the one used last: the daemon most probably has it still, and to give up the oldest would be
       to give up what comes next, round after round.

    One of them exists: the longest entry of all either is a leaf or an ancestor of `new`.

    Args:
        away: ticks of `used` since the conversation of `new`, which has lost its slot, was used; None: it has
            one, or is not known.
    """
    chain = sorted((entry for entry in entries if is_prefix(entry.ids, new)), key=lambda entry: entry.length)
    single = [entry for entry in chain if not _branches(entry, entries, chain)]
    if single:
        return min(single, key=lambda entry: (_gain(entry, chain), entry.used))
    leaves = [
        entry
        for entry in entries
        if not is_prefix(entry.ids, new) and not any(is_prefix(entry.ids, other.ids) for other in entries)
    ]
    now = max((entry.used for entry in entries), default=0)
    patience = float("inf") if away is None else PATIENCE * away
    doubtful = [entry for entry in leaves if not entry.proven or now - entry.used > patience]
    if doubtful:
        return min(doubtful, key=lambda entry: entry.used)
    return max(leaves, key=lambda entry: entry.used, default=None)


def goes_on(ids: bytes, entries: Collection[PrefixEntry]) -> bool:
    """Whether the prefix `ids` goes on from an entry that nobody else goes on from."""
    return any(is_prefix(entry.ids, ids) and not _branches(entry, entries, ()) for entry in entries)


def _branches(entry: PrefixEntry, entries: Collection[PrefixEntry], chain: Collection[PrefixEntry]) -> bool:
    """Whether an entry beside the chain starts with `entry`."""
    return any(is_prefix(entry.ids, other.ids) for other in entries if other not in chain)


def _gain(entry: PrefixEntry, chain: Sequence[PrefixEntry]) -> int:
    """Tokens that `entry` has beyond the next shorter one of the chain."""
    at = chain.index(entry)
    return entry.length - (chain[at - 1].length if at else 0)


def full_score(entry: FullEntry, prompt: bytes, key_of: Callable[[bytes], str]) -> float:
    """Worth of a full entry while `prompt` is at hand: (hits + 1) * tokens per byte of its file.

    A bound entry whose raw prompt is a strict prefix of `prompt` has been overtaken: its worth is cut, the
    less of the prompt it covers the more.
    """
    worth = (entry.hits + 1) * entry.length / entry.artifact_bytes if entry.artifact_bytes else 0.0
    raw_bytes = entry.raw_length * WIDTH
    overtaken = entry.slot is not None and raw_bytes < len(prompt)
    if overtaken and key_of(prompt[:raw_bytes]) == entry.key:
        worth *= PREFIX_HIT if entry.hits else PREFIX_UNUSED
        worth *= entry.length / (len(prompt) // WIDTH)
    return worth


def full_victim(
    entries: Collection[FullEntry], prompt: bytes, key_of: Callable[[bytes], str]
) -> FullEntry | None:
    """The full entry of least worth; among equals the one unused for longest."""
    return min(entries, key=lambda entry: (full_score(entry, prompt, key_of), entry.used), default=None)
