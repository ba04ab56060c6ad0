"""Message <-> one line of text, both ways: the face of `command_lines` and `event_lines`.

``parse_command(format_command(c)) == c`` and ``parse_event(format_event(e)) == e`` hold for every message
that can be formatted. A line here is text without its newline; bytes are the business of `connection`.
"""

from slotd.protocol.command_lines import format_command, parse_command
from slotd.protocol.event_lines import format_event, parse_event

__all__ = ["format_command", "format_event", "parse_command", "parse_event"]
