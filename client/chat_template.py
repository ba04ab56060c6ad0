"""Chat messages to one prompt text, by the Jinja template that the model file carries.

A template is code from a file: it runs in Jinja's immutable sandbox, and whatever goes wrong in it is a
`TemplateError` that leaves the session usable.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from slotd.client.reasoning import CLOSE
from slotd.protocol.errors import ConfigError, SlotdError

if TYPE_CHECKING:
    import jinja2


#: Variables of a template that are not the caller's to set.
OWN_VARIABLES = frozenset({"messages", "bos_token", "eos_token", "add_generation_prompt"})


class TemplateError(SlotdError):
    """A chat template is missing or broken, or it refuses the messages."""


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja text (`Tokenizer.chat_template`), None where the file has none.
        bos_token, eos_token: texts of these tokens, "" where there is none.

    Raises:
        TemplateError: no template, or one that does not compile.
    """

    def __init__(self, source: str | None, *, bos_token: str = "", eos_token: str = "") -> None:
        if not source:
            raise TemplateError(
                "the model file has no chat template (tokenizer.chat_template); send a plain prompt instead"
            )
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._source = source
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # the compiler is fed a foreign file: syntax, nesting, size
            raise TemplateError(f"the chat template does not compile: {_reason(error)}") from error

    @property
    def has_thoughts(self) -> bool:
        """Whether it is for a model that may reason before it answers."""
        return CLOSE in self._source

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template reads and does not set itself."""
        from jinja2 import meta

        return frozenset(meta.find_undeclared_variables(_environment().parse(self._source)))

    def check_extra(self, names: Iterable[str]) -> None:
        """Whether the template reads these variables. ConfigError names one that it does not."""
        for name in names:
            if name in OWN_VARIABLES:
                raise ConfigError(f"the template variable {name!r} is set by the client itself")
            if name not in self.variables:
                raise ConfigError(f"the chat template of this model does not read {name!r}")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The prompt text.

        Args:
            messages: a list of ``{"role": str, "content": str, ...}``; further keys reach the template.
            add_generation_prompt: whether the text ends with the opening of the assistant's turn.
            tools: tool descriptions, as the template wants them.
            extra: further variables of the template, e.g. ``enable_thinking=False``.

        Raises:
            TemplateError: a malformed message (named by its index), or the template failed or refused.
        """
        _check_messages(messages)
        variables: dict[str, Any] = {
            **self._tokens,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **extra,
        }
        try:
            return self._template.render(variables)
        except _refusal() as error:
            raise TemplateError(f"the chat template refuses the messages: {error}") from error
        except Exception as error:  # anything a foreign template can do wrong
            raise TemplateError(f"the chat template failed: {_reason(error)}") from error


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list | tuple):
        raise TemplateError(f"messages must be a list, not {type(messages).__name__}")
    if not messages:
        raise TemplateError("messages is empty")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TemplateError(f"messages[{index}] must be an object, not {type(message).__name__}")
        for key in ("role", "content"):
            if key not in message:
                raise TemplateError(f"messages[{index}] has no {key!r}")
            if not isinstance(message[key], str):
                kind = type(message[key]).__name__
                raise TemplateError(f"messages[{index}][{key!r}] must be a string, not {kind}")


def _reason(error: Exception) -> str:
    line = getattr(error, "lineno", None)  # template syntax errors have one
    where = "" if line is None else f"line {line}: "
    return f"{where}{str(error) or type(error).__name__}"


# ----- the environment. Jinja is imported on first use: most commands of the client never need it.


@functools.cache
def _refusal() -> type[Exception]:
    import jinja2

    class Refusal(jinja2.TemplateError):
        """The template called raise_exception."""

    return Refusal


@functools.cache
def _environment() -> jinja2.Environment:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _generation_block()],
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _to_json
    return environment


def _generation_block() -> type[jinja2.ext.Extension]:
    from jinja2 import nodes, parser
    from jinja2.ext import Extension

    class GenerationBlock(Extension):
        """``{% generation %} .. {% endgeneration %}`` marks text to train on; here it is only its content."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

        def parse(self, parser: parser.Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationBlock


def _raise_exception(message: object) -> NoReturn:
    raise _refusal()(str(message))


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes ``< > & '`` and non-ASCII, which the models never saw."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
