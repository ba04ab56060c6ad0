"""What STATUS and PROPS say, as rows of text for a table. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

Rows = list[tuple[str, str]]

#: Headings of `slot_rows`.
SLOT_COLUMNS = ("slot", "tokens", "kind", "tier", "size", "own", "last use", "hash")

#: Headings of `request_rows`.
REQUEST_COLUMNS = ("request", "phase", "prompt", "reused", "answer")

#: Digits of a hash that are shown.
HASH_DIGITS = 12

#: How requests began, and moves of the host tier: name in STATUS and name for a person.
BEGINNINGS = (("from_slot", "slots"), ("from_ended", "ended requests"), ("from_nothing", "nothing"))
MOVES = (("moves_out", "to host memory"), ("moves_in", "back"), ("dropped", "dropped"))

_TIMES = ((86400, "d"), (3600, "h"), (60, "min"))


def size(n_bytes: Any) -> str:
    """Bytes for a person: 0 B, 12.3 KiB, 1.50 GiB."""
    value = float(n_bytes) if isinstance(n_bytes, int | float) else 0.0
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return (
        f"{value:.0f} B"
        if unit == "B"
        else f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    )


def ago(seconds: Any) -> str:
    """A time for a person: 0.4 s, 12 s, 3 min, 2.5 h."""
    value = float(seconds) if isinstance(seconds, int | float) else 0.0
    for length, unit in _TIMES:
        if value >= length:
            return f"{value / length:.1f} {unit}"
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"


def clean(text: object) -> str:
    """Text of the daemon's that cannot drive a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def slot_rows(status: Mapping[str, Any], idle: float = 0.0) -> list[tuple[str, ...]]:
    """One row for each filled slot, by number. `idle`: seconds that have passed since `status` was true."""
    slots = {number: held for number, held in _map(status.get("slots")).items() if isinstance(held, Mapping)}
    in_order = sorted(slots, key=lambda number: int(number) if number.isdecimal() else 0)
    return [_slot_row(number, slots[number], idle) for number in in_order]


def _slot_row(number: str, held: Mapping[str, Any], idle: float) -> tuple[str, ...]:
    return (
        clean(number),
        f"{_int(held.get('tokens')):,}",
        clean(held.get("kind", "")),
        clean(held.get("tier", "")),
        size(held.get("bytes")),
        size(held.get("own_bytes")),
        ago(_float(held.get("idle_s")) + idle) + " ago",
        clean(held.get("hash") or "")[:HASH_DIGITS],
    )


def request_rows(status: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row for each running request."""
    running = status.get("running")
    return [
        (
            clean(job.get("id") or "(lane)"), clean(job.get("phase", "")),
            f"{_int(job.get('at'))}/{_int(job.get('prompt'))}", str(_int(job.get("reused"))),
            str(_int(job.get("gen"))),
        )
        for job in (running if isinstance(running, list) else [])
        if isinstance(job, Mapping)
    ]  # fmt: skip


def memory_rows(status: Mapping[str, Any]) -> Rows:
    """Device memory by purpose, the cache of the pool, pages, and the host tier."""
    memory, tier = _map(status.get("memory")), _map(status.get("host_tier"))
    live = {str(tag): _int(held) for tag, held in _map(memory.get("live")).items()}
    rows = [(clean(tag), size(held)) for tag, held in sorted(live.items(), key=lambda item: -item[1]) if held]
    if memory:
        rows += [
            ("cached", f"{size(memory.get('cached'))} ({clean(memory.get('pool', ''))} pool)"),
            ("free", f"{size(memory.get('free'))} of {size(memory.get('total'))}"),
            ("pages", f"{_int(memory.get('pages_used')):,} used, {_int(memory.get('pages_free')):,} free"),
        ]
    if tier:
        rows.append(("host tier", f"{size(tier.get('used'))} of {size(tier.get('budget'))}"))
    return rows


def counter_rows(status: Mapping[str, Any]) -> Rows:
    """Requests, cache hits, and what running out of memory has cost, since the start of the daemon."""
    totals, recovery, tier = (_map(status.get(name)) for name in ("totals", "recovery", "host_tier"))
    prompt, reused = _int(totals.get("prompt_tokens")), _int(totals.get("reused_tokens"))
    share = f" ({100 * reused / prompt:.0f}%)" if prompt else ""
    began = ", ".join(f"{name} {_int(totals.get(key))}" for key, name in BEGINNINGS)
    moves = ", ".join(f"{_int(tier.get(key))} {name}" for key, name in MOVES)
    return [
        *_engine_row(_map(status.get("engine"))),
        ("requests", f"{_int(totals.get('requests')):,}"),
        ("began from", began),
        ("prompt tokens", f"{prompt:,}, {reused:,} of them reused{share}"),
        ("answer tokens", f"{_int(totals.get('generated_tokens')):,}"),
        ("out of memory", _counts(_map(recovery.get("oom"))) or "never"),
        ("given up", _counts(_map(recovery.get("rungs"))) or "nothing"),
        ("all-cleared", str(_int(recovery.get("all_cleared")))),
        ("pool trims", _trims(_map(recovery.get("trims"))) or "none"),
        ("slots moved", moves),
    ]


def _engine_row(engine: Mapping[str, Any]) -> Rows:
    """The process that computes, when it is one of its own."""
    if not engine:
        return []
    text = f"process {_int(engine.get('pid'))}, {clean(engine.get('phase', '?'))}"
    text += f", replaced {_int(engine.get('replacements'))} times"
    died_of = engine.get("died_of")
    return [("engine", f"{text}, the last one died of: {clean(died_of)}" if died_of else text)]


def _trims(trims: Mapping[str, Any]) -> str:
    found = {clean(why): _map(counts) for why, counts in trims.items()}
    return ", ".join(
        f"{why} {_int(each.get('count'))} ({size(each.get('bytes'))})" for why, each in found.items()
    )


def head_line(props: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    """One line: the model, how it is computed, and how many requests there are."""
    model, backend, kv = (_map(props.get(name)) for name in ("model", "backend", "kv"))
    running = status.get("running")
    parts = [
        str(model.get("name", "no model named")), f"on {backend.get('name', '?')}",
        f"K/V {kv.get('k', '?')}/{kv.get('v', '?')}", f"context {_int(props.get('max_ctx')):,}",
        f"{len(running) if isinstance(running, list) else 0} of {_int(props.get('parallel'))} running",
        f"{_int(status.get('queued'))} waiting", f"epoch {_int(status.get('epoch'))}",
        f"policy when out of memory: {props.get('oom_policy', '?')}",
    ]  # fmt: skip
    if status.get("target", "loaded") != "loaded":
        parts.append(f"weights {status['target']}")
    return ", ".join(clean(part) for part in parts)


def columns(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines of text in columns of equal width, the headings first."""
    table = [tuple(headings), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


class Speeds:
    """Tokens per second over the last few seconds, out of totals that only grow.

    Args:
        window: seconds that a speed is a mean over, at most.
    """

    def __init__(self, window: float = 3.0) -> None:
        self._window = window
        self._seen: deque[tuple[float, int, int]] = deque()

    def see(self, now: float, status: Mapping[str, Any]) -> tuple[float, float]:
        """Speeds of computing prompts and of generating; 0 until there are two looks.

        now: seconds on any clock that only grows.
        """
        totals = _map(status.get("totals"))
        computed, generated = _int(totals.get("computed_tokens")), _int(totals.get("generated_tokens"))
        if self._seen and (computed < self._seen[-1][1] or generated < self._seen[-1][2]):
            self._seen.clear()  # another daemon
        self._seen.append((now, computed, generated))
        while len(self._seen) > 2 and now - self._seen[1][0] >= self._window:
            self._seen.popleft()
        began, computed_then, generated_then = self._seen[0]
        if now <= began:
            return 0.0, 0.0
        return (computed - computed_then) / (now - began), (generated - generated_then) / (now - began)


def _counts(counts: Mapping[str, Any]) -> str:
    return ", ".join(f"{clean(name)} {_int(n)}" for name, n in counts.items())


def _int(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
