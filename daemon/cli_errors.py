"""Wrong command lines and wrong variables of the daemon: one line that names what is wrong."""

from __future__ import annotations

import os
from typing import IO, Any

import click
from click.core import ParameterSource

from slotd.protocol.errors import ConfigError


class UsageError(click.UsageError):
    """A wrong command line: usage, then ``slotd: ...`` in one line, as every fault of the daemon ends.

    When it was a variable and no flag that is wrong, the line names that, and the usage is no help.
    """

    def __init__(self, error: click.UsageError) -> None:
        message = error.format_message()
        self._variable = False
        if isinstance(error, click.BadParameter) and isinstance(error.param, click.Option) and error.ctx:
            self._variable = _is_from_variable(error.ctx, error.param)
            if self._variable:
                message = _wrong_variable(error, error.param)
        super().__init__(message, error.ctx)

    def show(self, file: IO[Any] | None = None) -> None:
        if self.ctx is not None and not self._variable:
            click.echo(self.ctx.get_usage(), file, err=True)
            click.echo(f"Try '{self.ctx.command_path} -h' for help.\n", file, err=True)
        click.echo(f"slotd: {self.message}", file, err=True)


def _is_from_variable(ctx: click.Context, option: click.Option) -> bool:
    return ctx.get_parameter_source(option.name or "") is ParameterSource.ENVIRONMENT


def _wrong_variable(error: click.BadParameter, option: click.Option) -> str:
    value = os.environ.get(str(option.envvar), "")
    wanted = {"integer": "a whole number", "float": "a number"}.get(option.type.name)
    return f"{option.envvar} {value!r}: must be {wanted}" if wanted else f"{option.envvar}: {error.message}"


#: How errors name what `-ctk` and `-ctv` choose.
_PLANES = {"k_type": "K", "v_type": "V"}


def naming_variable(error: ConfigError) -> ConfigError:
    """The error of a flag, with the variable in front when that was where the flag's value came from."""
    ctx = click.get_current_context()
    for option in ctx.command.params:
        if isinstance(option, click.Option) and _is_from_variable(ctx, option):
            name = option.name or ""
            starts = [f"{spelling} " for spelling in option.opts]
            if name in _PLANES:
                starts.append(f"{_PLANES[name]} type {ctx.params[name]} ")
            if str(error).startswith((*starts, repr(ctx.params[name]))):
                return ConfigError(f"{option.envvar}: {error}")
    return error


class Command(click.Command):
    """A command whose usage errors end in one line of ours."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            raise UsageError(error) from error


class Group(click.Group):
    """The group under the name that its commands are called by, whatever this process was started as."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        return super().make_context("slotd", args, parent, **extra)
