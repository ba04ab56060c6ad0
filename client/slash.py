"""The commands of the chat: one table, which `/help`, completion and dispatch read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slotd.client.conversation import Conversation
from slotd.client.params import parse_assignments, shown
from slotd.client.rates import rate_line
from slotd.client.status_rows import SLOT_COLUMNS, columns, slot_rows
from slotd.protocol.errors import SlotdError

if TYPE_CHECKING:
    from slotd.client.chat import Chat


#: Counts of `cache_stats` that /slots shows, and what they are called there.
CACHE_COUNTS = (
    ("prefix_hits", "prompts started from a slot"),
    ("prefix_hit_tokens", "tokens that were in these slots"),
    ("passed", "prompts with a slot that saved no time"),
    ("misses", "prompts that no slot fits"),
    ("confirmed", "prefixes kept in a slot"),
    ("aborted", "prefixes that could not be kept"),
    ("cleared", "times the daemon cleared the slots"),
)


class Quit(Exception):
    """/quit was typed."""


@dataclass(frozen=True, slots=True)
class Command:
    """One row: how it is written, what it does, what runs. `argument`: none, optional or needed."""

    usage: str
    help: str
    argument: str
    run: Callable[[Chat, str], None]


def _help(chat: Chat, argument: str) -> None:
    chat.ui.table([(command.usage, command.help) for command in COMMANDS.values()])
    chat.ui.notice('Several lines: """ opens, """ closes. Ctrl-C cancels an answer, Ctrl-D leaves.')


def _system(chat: Chat, argument: str) -> None:
    if argument:
        chat.conversation.set_system("" if argument == "-" else argument)
    chat.ui.notice(f"system: {chat.conversation.system or '(that of the chat template)'}")


def _reset(chat: Chat, argument: str) -> None:
    chat.conversation.reset()
    chat.ui.notice("the conversation is empty")


def _save(chat: Chat, argument: str) -> None:
    path = Path(argument).expanduser()
    chat.conversation.save(path)
    chat.ui.notice(f"saved {len(chat.conversation.messages)} messages to {path}")


def _load(chat: Chat, argument: str) -> None:
    path = Path(argument).expanduser()
    loaded = Conversation.load(path)
    if loaded.model != chat.conversation.model:
        chat.ui.notice(f"note: {path} was made with {loaded.model or 'an unnamed model'}")
    loaded.model = chat.conversation.model
    chat.conversation = loaded
    chat.ui.notice(f"loaded {len(loaded.messages)} messages; the next turn reads them again")


def _params(chat: Chat, argument: str) -> None:
    if argument:
        chat.conversation.set_params(parse_assignments(argument))
    chat.ui.table([(name, shown(name, value)) for name, value in chat.conversation.params.items()])


def _stats(chat: Chat, argument: str) -> None:
    if chat.last is None:
        chat.ui.notice("no answer yet")
        return
    chat.ui.notice(rate_line(chat.last))
    rows = [(stage, f"{seconds:.4f}") for stage, seconds in chat.last.timings.items() if seconds]
    if chat.last.reasoning_tokens:
        rows.append(("tokens of its thought", str(chat.last.reasoning_tokens)))
    rows += [("turns", str(chat.turns)), ("tokens generated", str(chat.tokens))]
    chat.ui.table(rows)


def _slots(chat: Chat, argument: str) -> None:
    rows = slot_rows(chat.client.status())
    total: Any = chat.client.hello.get("slots", "?")
    stats = chat.client.cache_stats()
    chat.ui.notice(f"slots in use: {', '.join(row[0] for row in rows) or 'none'} (of {total})")
    if rows:
        notes = [(*row[1:], _cached(stats["entries"].get(int(row[0])))) for row in rows]
        lines = columns((*SLOT_COLUMNS[1:], "in the cache"), notes)
        chat.ui.table(list(zip((SLOT_COLUMNS[0], *(row[0] for row in rows)), lines, strict=True)))
    prefix = stats["prefix"]
    if not stats["active"]:
        chat.ui.notice("the prefix cache is off")
        return
    chat.ui.notice(f"prefix cache: {prefix['entries']} of {prefix['slots']} slots, {prefix['tokens']} tokens")
    chat.ui.table([(said, str(stats[name])) for name, said in CACHE_COUNTS])


def _cached(entry: Mapping[str, Any] | None) -> str:
    """What the client's caches take a slot for."""
    return "" if entry is None else f"{entry['kind']}, {entry['tokens']} tokens, {entry['hits']} hits"


def _quit(chat: Chat, argument: str) -> None:
    raise Quit


COMMANDS: Mapping[str, Command] = {
    "/help": Command("/help", "this list", "none", _help),
    "/system": Command("/system [TEXT]", "show or set the system message; - is none", "optional", _system),
    "/reset": Command("/reset", "forget the turns, keep the system message", "none", _reset),
    "/save": Command("/save FILE", "write the conversation as JSON", "needed", _save),
    "/load": Command("/load FILE", "go on with a saved conversation", "needed", _load),
    "/params": Command("/params [NAME=VALUE ...]", "show or set how answers are made", "optional", _params),
    "/stats": Command("/stats", "rates and times of the last answer", "none", _stats),
    "/slots": Command("/slots", "the slots of the daemon, and what the caches use them for", "none", _slots),
    "/quit": Command("/quit", "leave (also Ctrl-D)", "none", _quit),
}


def is_command(text: str) -> bool:
    return text.lstrip().startswith("/")


def run(chat: Chat, text: str) -> bool:
    """Run a typed command; returns whether it worked. Faults are shown, never raised, except Quit."""
    name, _, argument = text.strip().partition(" ")
    argument = argument.strip()
    command = COMMANDS.get(name)
    if command is None:
        chat.ui.error(f'unknown command {name}: /help lists them; to send such a text put it in """ """')
        return False
    if command.argument == "none" and argument:
        chat.ui.error(f"{name} takes no argument")
        return False
    if command.argument == "needed" and not argument:
        chat.ui.error(f"usage: {command.usage}")
        return False
    try:
        command.run(chat, argument)
    except OSError as error:
        chat.ui.error(f"{argument or name}: {error.strerror or error}")
        return False
    except SlotdError as error:
        chat.ui.error(str(error))
        return False
    return True
