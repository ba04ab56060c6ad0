"""Measured figures: one JSON line each as they come, and the table of those that have a goal."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure is held against.

    Attributes:
        field: which value of the figure counts.
        text: how the value is printed.
        must, aim: its bounds; aim None: there is none.
        more: whether more is better.
        peer: llama.cpp's figure on the same card, as text.
    """

    field: str
    text: str
    must: float
    aim: float | None
    more: bool = True
    peer: str = "-"

    def met(self, value: float) -> str:
        """aim, must or no: the strictest bound that the value keeps."""
        for name, bound in (("aim", self.aim), ("must", self.must)):
            if bound is not None and (value >= bound if self.more else value <= bound):
                return name
        return "no"


def _rate(must: float, aim: float, peer: str = "-") -> Goal:
    return Goal("tokens_per_s", "{:,.0f} tok/s", must, aim, peer=peer)


def _share(must: float, aim: float) -> Goal:
    return Goal("share_of_copy", "{:.1%} of copy", must, aim, peer="29-31% on its 27B")


#: (figure, model, size) -> goal, for one H200 and exact math.
GOALS = {
    ("decode", "135m", 0): _rate(1200, 1900, "944"),
    ("decode", "135m", 4096): _rate(1100, 1700, "868"),
    ("prefill", "135m", 4096): _rate(80_000, 200_000, "68,200"),
    ("decode", "23b", 0): _share(0.48, 0.65),
    ("decode", "23b", 8192): _share(0.46, 0.62),
    ("decode", "23b", 32768): _share(0.42, 0.55),
    ("rows", "23b", 16): Goal("ms", "{:.2f} ms", 10.0, 6.5, more=False, peer="24.2 ms on its 27B"),
    ("rows", "23b", 23): Goal("ms", "{:.2f} ms", 12.0, 7.6, more=False, peer="27.9 ms on its 27B"),
    ("prefill", "23b", 512): _rate(3500, 6000),
    ("prefill", "23b", 2048): _rate(4200, 8500),
    ("prefill", "23b", 8192): _rate(4000, 8000),
    ("prefill", "23b", 32768): _rate(3200, 5500),
    ("overhead", "135m", 0): Goal("us", "{:.0f} us", 100, 60, more=False),
    ("overhead", "23b", 0): Goal("us", "{:.0f} us", 100, 60, more=False),
    ("snapshot", "23b", 4096): Goal("ms", "{:.3f} ms", 0.5, 0.2, more=False),
    ("restore", "23b", 4096): Goal("ms", "{:.3f} ms", 0.5, 0.2, more=False),
    ("host_save", "23b", 4096): Goal("share_of_pinned", "{:.0%} of pinned", 0.6, 0.8),
    ("host_load", "23b", 4096): Goal("share_of_pinned", "{:.0%} of pinned", 0.6, 0.8),
    ("decode", "qwen35-27b", 0): _rate(125, 165, "82.7"),
    ("decode", "qwen35-27b", 32768): _rate(115, 155, "78.6"),
    ("decode", "qwen35-27b", 131072): _rate(95, 130),
    ("prefill", "qwen35-27b", 2048): _rate(3500, 7500, "2,640"),
    ("prefill", "qwen35-27b", 8192): _rate(3500, 7500, "2,653"),
    ("prefill", "qwen35-27b", 65536): _rate(3000, 6000, "2,522 (32K)"),
    ("rows", "qwen35-27b", 16): Goal("with_commit_ms", "{:.2f} ms", 12.0, 7.5, more=False, peer="24.2 ms"),
    ("rows", "qwen35-27b", 23): Goal("with_commit_ms", "{:.2f} ms", 14.0, 9.0, more=False, peer="27.9 ms"),
    ("full", "qwen35-27b", 262144): _rate(80, 120),
    ("long", "qwen35-27b", 258013): _rate(2000, 3300),
    ("decode", "qwen35-0.8b", 0): _rate(400, 900),
    ("prefill", "qwen35-0.8b", 4096): _rate(40_000, 100_000),
    ("cold_start", "135m", 0): Goal("s", "{:.2f} s", 4.0, 2.0, more=False),
}


class Figures:
    """Prints each figure at once, so that a run that is ended keeps what it had.

    Args:
        out: where the JSON lines go.
        file: a file that gets them too.
    """

    def __init__(self, out: TextIO, file: Path | None = None) -> None:
        self._out = out
        self._file = file
        self.all: list[dict[str, Any]] = []

    def add(self, figure: str, model: str = "", size: int = 0, **values: Any) -> None:
        """Record one figure: what, of which model, at which size (depth, rows, tokens), and its values."""
        entry = {"figure": figure, "model": model, "size": size}
        entry |= {name: _short(value) for name, value in values.items()}
        self.all.append(entry)
        line = json.dumps(entry)
        print(line, file=self._out, flush=True)
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def table(self) -> str:
        """Every figure with its goal, as text."""
        lines = [f"{'work':<26}{'measured':>18}  {'keeps':<6}{'must':>10}{'aim':>10}  llama.cpp"]
        for entry in self.all:
            goal = GOALS.get((entry["figure"], entry["model"], entry["size"]))
            name = f"{entry['figure']} {entry['model']} {entry['size'] or ''}".strip()
            if goal is None or entry.get(goal.field) is None:
                lines.append(f"{name:<26}{_plain(entry)}")
                continue
            value = entry[goal.field]
            bounds = f"{goal.must:>10,g}{goal.aim if goal.aim is not None else '-':>10,g}"
            lines.append(
                f"{name:<26}{goal.text.format(value):>18}  {goal.met(value):<6}{bounds}  {goal.peer}"
            )
        return "\n".join(lines)


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _plain(entry: dict[str, Any]) -> str:
    values = {name: value for name, value in entry.items() if name not in ("figure", "model", "size")}
    return "  ".join(
        f"{name} {f'{value:,.4g}' if isinstance(value, float) else value}"
        for name, value in values.items()
        if value is not None
    )
