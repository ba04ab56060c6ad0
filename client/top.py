"""`slotd top`: what a running daemon does and holds, live on a terminal, or once as text or JSON."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from slotd.client.daemon_states import DaemonState, NoStateError, path_of, read_state, running_daemons
from slotd.client.status_rows import (
    REQUEST_COLUMNS,
    SLOT_COLUMNS,
    Rows,
    Speeds,
    ago,
    columns,
    counter_rows,
    head_line,
    memory_rows,
    request_rows,
    slot_rows,
)

#: A daemon that computes and has said nothing for so long is shown as silent, in seconds.
SILENT = 2.0


@dataclass(frozen=True, slots=True)
class Choice:
    """Which daemon: by number, by file, or (neither) whatever runs and publishes in `folder`."""

    folder: Path
    pid: int | None = None
    file: Path | None = None

    def states(self) -> list[DaemonState]:
        """The daemons that are meant, the one started last at the end.

        Raises:
            NoStateError: there is none.
        """
        if self.pid is None and self.file is None:
            states = running_daemons(self.folder)
            if not states:
                raise NoStateError(
                    f"no daemon publishes its state in {self.folder} (--state-dir names another folder)"
                )
            return states
        state = read_state(self.file if self.file is not None else path_of(self.pid or 0, self.folder))
        if not state.running:
            raise NoStateError(f"the daemon {state.pid} has ended")
        return [state]


def run(choice: Choice, *, interval: float, once: bool, as_json: bool) -> int:
    """Show it until Ctrl-C or the daemon's end; `once`, or without a terminal, one time. The exit code."""
    states = choice.states()
    if as_json:
        for state in states:
            print(json.dumps(state.as_dict(), ensure_ascii=False))
        return 0
    if once or not sys.stdout.isatty():
        print("\n\n".join("\n".join(plain(state)) for state in states))
        return 0
    newest = states[-1]
    others = len(states) - 1
    file = choice.file if choice.file is not None else path_of(newest.pid, choice.folder)
    return _watch(Choice(choice.folder, newest.pid, file), newest, interval, others)


def _watch(choice: Choice, state: DaemonState, interval: float, others: int) -> int:
    speeds = Speeds()
    console = Console(highlight=False)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                rates = speeds.see(time.monotonic(), state.status)
                live.update(view(state, rates, others), refresh=True)
                time.sleep(interval)
                [state] = choice.states()
    except KeyboardInterrupt:
        return 0
    except NoStateError:
        console.print(Text(f"the daemon {state.pid} has ended"))
        return 0


def plain(state: DaemonState) -> list[str]:
    """Everything as lines of text."""
    lines = [_title(state), head_line(state.props, state.status)]
    for name, rows in (
        ("memory", memory_rows(state.status)),
        ("since the start", counter_rows(state.status)),
    ):
        lines += ["", name, *(f"  {line}" for line in columns(rows[0], rows[1:]))] if rows else []
    idle = _age(state)
    for name, headings, table in (
        ("slots", SLOT_COLUMNS, slot_rows(state.status, idle)),
        ("requests", REQUEST_COLUMNS, request_rows(state.status)),
    ):
        lines += ["", name, *(f"  {line}" for line in (columns(headings, table) if table else ["none"]))]
    return lines


def view(state: DaemonState, rates: tuple[float, float], others: int = 0) -> RenderableType:
    """Everything for a terminal. rates: tokens per second of prompts and of answers."""
    status = state.status
    speed = f"prompts {rates[0]:,.0f} tok/s, answers {rates[1]:,.1f} tok/s"
    head = [Text(head_line(state.props, status)), Text(speed, style="bold green")]
    if status.get("running") and _age(state) > SILENT:
        head.append(Text(f"no news from it for {ago(_age(state))}", style="bold red"))
    if others:
        head.append(
            Text(f"{others} more running: slotd top --once lists all, slotd top PID shows one", style="dim")
        )
    facts = Columns(
        [_facts("memory", memory_rows(status)), _facts("since the start", counter_rows(status))],
        padding=(0, 1),
    )
    return Group(
        Panel(Group(*head), title=Text(_title(state)), title_align="left"),
        facts,
        _table("slots", SLOT_COLUMNS, slot_rows(status, _age(state))),
        _table("requests", REQUEST_COLUMNS, request_rows(status)),
        Text("Ctrl-C leaves", style="dim"),
    )


def _title(state: DaemonState) -> str:
    return f"slotd {state.pid}, up {ago(max(0.0, time.time() - state.started))}"


def _age(state: DaemonState) -> float:
    """Seconds since the engine's part of it was true."""
    age = state.status.get("age_ms")
    return max(0.0, time.time() - state.written) + (age / 1000 if isinstance(age, int | float) else 0.0)


def _facts(title: str, rows: Rows) -> Panel:
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(value))
    return Panel(table, title=title, title_align="left")


def _table(title: str, headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> RenderableType:
    if not rows:
        return Text(f"no {title}")
    table = Table(title=title, title_justify="left", expand=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
