"""Everything that is shown to a person: answers on stdout, all else on stderr through rich.

Colour follows rich, which honours NO_COLOR.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.status import Status
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from slotd.client.batch import Counts

#: A model must not be able to drive the terminal: control characters but tab and newline are dropped.
_UNSAFE = {code: None for code in [*range(32), *range(127, 160)] if chr(code) not in "\t\n"}


class Screen:
    """Answers and notices of one command. Implements `chat.Ui`.

    Args:
        interactive: a person is there: notices and progress are shown.
        out: where answers go; default stdout.
        show_reasoning: show thoughts, on stderr; else only that the model thinks.
    """

    def __init__(self, *, interactive: bool, out: TextIO | None = None, show_reasoning: bool = False) -> None:
        self.interactive = interactive
        self._show_reasoning = show_reasoning
        self._thinking = False  # a thought is shown and its last line is not ended
        self._out = out if out is not None else sys.stdout
        self._clean = self._out.isatty()
        self._console = Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._open = False  # an answer has begun and its last line is not ended

    def progress(self, at: int, of: int) -> None:
        if not self.interactive or not self._console.is_terminal:
            return
        self._show_status(f"reading the prompt: {at}/{of}")

    def _show_status(self, text: str) -> None:
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def reasoning(self, text: str) -> None:
        """A piece of the thought before the answer."""
        if not text:
            return
        if self._show_reasoning:
            self._stop_status()
            shown = text.translate(_UNSAFE) if self._console.is_terminal else text
            self._console.print(Text(shown, style="dim italic"), end="", soft_wrap=True)
            self._thinking = True
        elif self.interactive and self._console.is_terminal:
            self._show_status("thinking")

    def _end_thought(self) -> None:
        if self._thinking:
            self._console.print("\n")
            self._thinking = False

    def answer(self, text: str) -> None:
        if not text:
            return
        self._stop_status()
        self._end_thought()
        self._out.write(text.translate(_UNSAFE) if self._clean else text)
        self._out.flush()
        self._open = not text.endswith("\n")

    def end_answer(self) -> None:
        """End the line an answer stands on."""
        self._stop_status()
        self._end_thought()
        if self._open:
            self._out.write("\n")
            self._out.flush()
            self._open = False

    def notice(self, text: str) -> None:
        self._console.print(Text(text, style="dim"), soft_wrap=True)

    def error(self, text: str) -> None:
        self.end_answer()
        self._console.print(Text.assemble(("slotd: ", "bold red"), text), soft_wrap=True)

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        _print_facts(self._console, rows)

    def _stop_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table of results on stdout; the first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)


def print_facts(rows: Sequence[tuple[str, str]]) -> None:
    """Two columns of name and value on stdout."""
    _print_facts(Console(highlight=False), rows)


def _print_facts(console: Console, rows: Sequence[tuple[str, str]]) -> None:
    # Not a rich table: that would fold long values at 80 columns where the width is not known.
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        console.print(Text.assemble((name.ljust(width), "bold"), "  ", value), soft_wrap=True)


class BatchProgress:
    """Progress of a batch on stderr, when that is a terminal; else nothing."""

    def __init__(self, total_bytes: int | None) -> None:
        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("starting", total=total_bytes)

    def update(self, counts: Counts) -> None:
        text = f"{counts.done} done, {counts.failed} failed, {counts.tokens} tokens"
        if counts.taken:
            text += f", {counts.taken} taken from an earlier run"
        self._progress.update(self._task, completed=counts.read, description=text)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()
