"""Commands that replace this process by the daemon; arguments and descriptors pass through untouched."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def run(verb: str, args: list[str]) -> NoReturn:
    """Become ``python -m slotd.daemon VERB ARGS``. Descriptors that the caller passed on stay open."""
    sys.stdout.flush()
    sys.stderr.flush()
    # -P keeps the current folder off the import path: a stray queue.py there must not be found.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "slotd.daemon", verb, *args])


def run_daemon(args: list[str]) -> NoReturn:
    """`run` for the daemon; when no model is named the default one is fetched and put first."""
    if not names_model(args) and not asks_for_help(args):
        from slotd.client.fetch import resolve_model

        args = [str(resolve_model(None, fetch=True)), *args]
    run("daemon", args)


def run_inspect(args: list[str]) -> NoReturn:
    """`run` for ``inspect``; when no file is named the default one is fetched and put first."""
    if not names_file(args) and not asks_for_help(args):
        from slotd.client.fetch import resolve_model

        args = [str(resolve_model(None, fetch=True)), *args]
    run("inspect", args)


#: Flags of ``inspect`` whose value is the next word.
INSPECT_VALUES = frozenset(
    {"-c", "--ctx", "--max-ctx", "-ctk", "--cache-type-k", "-ctv", "--cache-type-v", "--memory-limit"}
)


def names_file(args: list[str]) -> bool:
    """Whether the arguments of ``inspect`` have a word that is no flag and no value of one."""
    before = [None, *args]
    return any(
        before_it not in INSPECT_VALUES and (not word.startswith("-") or before_it == "--")
        for before_it, word in zip(before, args, strict=False)
    )


def names_model(args: list[str]) -> bool:
    """Whether the arguments have a model: a word in the first place (as in the source's command line), -m,
    or a GGUF file anywhere. Which flags take a value is the daemon's business, so a bare word elsewhere
    says nothing."""
    if args and not args[0].startswith("-"):
        return True
    return any(_is_model_flag(arg) or (arg.lower().endswith(".gguf") and arg[0] != "-") for arg in args)


def _is_model_flag(arg: str) -> bool:
    return arg == "--model" or arg.startswith(("--model=", "-m"))


def asks_for_help(args: list[str]) -> bool:
    return any(arg in ("-h", "--help", "--version") for arg in args)
