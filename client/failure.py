"""What went wrong, for programs and for people: errors of the client's own, exit codes, plain sentences."""

from __future__ import annotations

from collections.abc import Mapping

from slotd.protocol.errors import (
    ConfigError,
    DaemonStartError,
    ModelError,
    RequestError,
    SlotdError,
    Value,
)

EXIT_FAILED, EXIT_USAGE, EXIT_MODEL = 1, 2, 3

#: What the daemon says of a failed request beside the fields of the error itself, times apart.
_ACCOUNT = frozenset({"reused", "gen", "epoch", "seed"})


class ClientClosedError(SlotdError):
    """The client was closed, so it takes no more calls."""


class DaemonExitError(DaemonStartError):
    """The daemon ended before it was ready.

    Attributes:
        exit_code: as the system reports it; negative: the signal that ended it.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class FailedRequestError(RequestError):
    """A request that ended with ``[done] status=err``.

    `fields` has all that the line says; the text leaves out the account of tokens and times.
    """

    def __str__(self) -> str:
        return str(RequestError(self.code, own_fields(self.fields)))


def done_error(fields: Mapping[str, Value], id: str | None, verb: str = "") -> FailedRequestError:
    """The error that the fields of a failed ``[done]`` stand for."""
    rest = {name: value for name, value in fields.items() if name != "code"}
    return FailedRequestError(str(fields.get("code", "internal")), rest, id=id, verb=verb)


def own_fields(fields: Mapping[str, Value]) -> dict[str, Value]:
    """The fields that name the thing and the limit, without the account that a ``[done]`` ends with."""
    names = list(fields)
    account = {name for name in names if name.endswith("_s")}
    if "wall_s" in fields:
        account |= _ACCOUNT
        if "reused" in fields and names[: names.index("reused")][-1:] == ["prompt"]:
            account.add("prompt")  # `prompt reused gen` opens the account; an error may have its own before
    return {name: value for name, value in fields.items() if name not in account}


def start_error(message: str, exit_code: int | None, last_words: str) -> DaemonStartError:
    """The error for a daemon that ended while it started.

    One that knew what was wrong has said so in its last line, ``slotd: ...``: then that is the message.
    """
    if exit_code is None:
        return DaemonStartError(message)
    last = last_words.splitlines()[-1:]
    if last and last[0].startswith("slotd: "):
        message = last[0].removeprefix("slotd: ")
    return DaemonExitError(message, exit_code)


def exit_code(error: SlotdError) -> int:
    """The exit code of a command that ended with `error`."""
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    if isinstance(error, ModelError):
        return EXIT_MODEL
    if isinstance(error, DaemonExitError) and error.exit_code in (EXIT_USAGE, EXIT_MODEL):
        return error.exit_code  # the daemon has the same codes
    return EXIT_FAILED


def explain(error: Exception, remedy: str) -> str:
    """The message for a person; of a request that does not fit: a sentence that ends with `remedy`."""
    if isinstance(error, RequestError) and error.code == "overflow":
        prompt, context = error.fields.get("prompt"), error.fields.get("max_ctx")
        if isinstance(prompt, int) and isinstance(context, int):
            wanted = f" and {error.fields.get('n_gen')} more were asked for" if prompt < context else ""
            return f"the prompt has {prompt} tokens{wanted}, the context has {context}: {remedy}"
    return str(error)
