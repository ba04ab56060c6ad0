"""A conversation: messages and parameters, and the JSON file it is saved to.

File: ``{"model": NAME, "params": {...}, "messages": [{"role": ..., "content": ...}, ...]}``.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slotd.client.params import ParamDict, check_all
from slotd.protocol.errors import ConfigError

ROLES = ("system", "user", "assistant")
Message = dict[str, str]


def check_text(value: Any, where: str) -> str:
    """A text that can be written as UTF-8. JSON can carry half of a surrogate pair, which cannot."""
    if not isinstance(value, str):
        raise ConfigError(f"{where} is not a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where} has half of a surrogate pair at character {error.start}") from None
    return value


def check_message(value: Any, where: str) -> Message:
    """One chat message: exactly a known role and a text. ConfigError names `where` and the fault."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is not an object")
    unknown = sorted(set(value) - {"role", "content"})
    if unknown:
        raise ConfigError(f"{where}.{unknown[0]} is not supported: a message has role and content")
    if value.get("role") not in ROLES:
        raise ConfigError(f"{where}.role is {value.get('role')!r}; allowed is {', '.join(ROLES)}")
    return {"role": value["role"], "content": check_text(value.get("content"), f"{where}.content")}


def check_messages(value: Any, where: str = "messages") -> list[Message]:
    if not isinstance(value, list):
        raise ConfigError(f"{where} is not a list")
    return [check_message(message, f"{where}[{index}]") for index, message in enumerate(value)]


@dataclass(slots=True)
class Conversation:
    """What was said, and how answers are made."""

    params: ParamDict
    messages: list[Message] = field(default_factory=list)
    model: str = ""

    @property
    def system(self) -> str | None:
        first = self.messages[0] if self.messages else None
        return first["content"] if first is not None and first["role"] == "system" else None

    def set_system(self, text: str) -> None:
        """Put `text` at the head, in place of an earlier system message. Empty text removes it."""
        rest = self.messages[1:] if self.system is not None else self.messages
        self.messages = ([{"role": "system", "content": text}] if text else []) + rest

    def reset(self) -> None:
        """Forget every turn; the system message stays."""
        self.messages = self.messages[:1] if self.system is not None else []

    def set_params(self, values: ParamDict) -> None:
        """Set checked parameters. ConfigError when they do not go with the others; then none is set."""
        self.params = check_all({**self.params, **values})

    def asking(self, text: str) -> list[Message]:
        """The messages with one more user turn, which is not kept yet."""
        return [*self.messages, {"role": "user", "content": text}]

    def add_turn(self, question: str, answer: str) -> None:
        self.messages = [*self.asking(question), {"role": "assistant", "content": answer}]

    def save(self, path: Path) -> None:
        """Write the file whole or not at all; readable by its owner only, since prompts are private."""
        data = {"model": self.model, "params": self.params, "messages": self.messages}
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(data, file, ensure_ascii=False, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """Read and check a saved file. ConfigError names the file and the fault; OSError passes."""
        try:
            data = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not a saved conversation: {error}") from error
        if not isinstance(data, dict) or set(data) != {"model", "params", "messages"}:
            raise ConfigError(f"{path}: not a saved conversation: it has model, params and messages")
        try:
            messages = check_messages(data["messages"])
            return cls(check_all(data["params"]), messages, check_text(data["model"], "model"))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
