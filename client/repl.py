"""``slotd chat``: the loop of turns, from a terminal or from a pipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from slotd.client import slash
from slotd.client.chat import Chat, Leave
from slotd.client.prompt_lines import TurnReader

HISTORY_NAME = "chat_history"


def history_path() -> Path:
    """Where typed lines are kept: SLOTD_HOME if set, else the user's state folder for slotd."""
    home = os.environ.get("SLOTD_HOME")
    if home:
        return Path(home).expanduser().absolute() / HISTORY_NAME
    import platformdirs

    return platformdirs.user_state_path("slotd", appauthor=False) / HISTORY_NAME


def open_history(notice: Callable[[str], None]) -> History:
    """The history file, readable by its owner only; in memory with SLOTD_NOHISTORY or where none can be."""
    if os.environ.get("SLOTD_NOHISTORY"):
        return InMemoryHistory()
    path = history_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.fchmod(descriptor, 0o600)
        os.close(descriptor)
    except OSError as error:
        notice(f"no history: {path}: {error.strerror}")
        return InMemoryHistory()
    return FileHistory(str(path))


def run_terminal(chat: Chat, read: Callable[[str], str] | None = None) -> int:
    """Turns from a person. Returns the exit code: 0 for /quit and Ctrl-D, 130 for two times Ctrl-C.

    Args:
        read: reads one line after a prompt; raises EOFError and KeyboardInterrupt. Default: the terminal.
    """
    read = read or _terminal_reader(chat)
    turns = TurnReader()
    chat.ui.notice("/help lists the commands, Ctrl-D leaves")
    with chat.interrupts.installed():
        while True:
            try:
                text = turns.feed(read("... " if turns.open else "> "))
                if text is not None:
                    _take(chat, text, turns.quoted)
            except (EOFError, slash.Quit):
                return 0
            except Leave:
                return 130
            except KeyboardInterrupt:
                turns.drop()
                if chat.interrupts.second_press():
                    return 130
                chat.ui.notice("Ctrl-C again within a second, or Ctrl-D, leaves")


def run_pipe(chat: Chat, lines: Iterable[bytes]) -> int:
    """Turns from lines of a pipe or file. Only answers go to stdout.

    Whatever is wrong with a line, the lines that follow are answered. Returns the exit code: 1 when
    anything was wrong, else 0.
    """
    turns = TurnReader()
    well = True
    try:
        for number, raw in enumerate(lines, start=1):
            try:
                text = turns.feed(raw.decode("utf-8"))
            except UnicodeDecodeError as error:
                turns.drop()
                chat.ui.error(f"line {number} is not UTF-8 at byte {error.start}")
                well = False
                continue
            if text is not None:
                well = _take(chat, text, turns.quoted) and well
    except slash.Quit:
        return 0 if well else 1
    if turns.open:
        chat.ui.error('the last """ was never closed; that text was not asked')
        well = False
    return 0 if well else 1


def _take(chat: Chat, text: str, quoted: bool) -> bool:
    """Run a command or answer a turn; whether that worked."""
    if not quoted and slash.is_command(text):
        return slash.run(chat, text)
    return chat.ask(text)


def _terminal_reader(chat: Chat) -> Callable[[str], str]:
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _newline(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        history=open_history(chat.ui.notice),
        completer=WordCompleter(list(slash.COMMANDS), sentence=True),
        complete_while_typing=False,
        key_bindings=keys,
    )
    return session.prompt
