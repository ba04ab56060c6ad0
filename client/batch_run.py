"""``slotd batch`` put together: files, journal, client, progress, and the exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slotd.client.batch import Batch, Counts, FileSink, PipeSink, open_source, settings_hash
from slotd.client.journal import Journal
from slotd.client.params import ParamDict
from slotd.client.render import BatchProgress, Screen
from slotd.protocol.errors import ConfigError

if TYPE_CHECKING:
    from slotd.client.client import Client


@dataclass(frozen=True, slots=True)
class Files:
    """What goes in and where it comes out; ``-`` is stdin or stdout."""

    source: str
    out: str
    resume: bool = False
    stream: bool = False

    @property
    def live(self) -> bool:
        """Answers go to stdout as they finish."""
        return self.out == "-"


def check_files(source: str, out: str | None, *, resume: bool, stream: bool) -> Files:
    """Refuse what cannot go together, before anything is spawned. ConfigError names it."""
    if out is None and source != "-":
        raise ConfigError("-o OUT.jsonl is missing (- is stdout)")
    files = Files(source, out or "-", resume, stream)
    if source != "-" and not os.path.isfile(source) and not _is_pipe(source):
        raise ConfigError(f"{source}: no such file")
    if files.live and resume:
        raise ConfigError("--resume needs an output file: stdout keeps no records")
    if stream and not files.live:
        raise ConfigError("--stream needs the output -: a file takes whole records only")
    if resume and os.path.exists(files.out) and not os.path.exists(files.out + ".part"):
        raise ConfigError(
            f"{files.out} is complete, there is nothing to resume: "
            "remove it, or run without --resume to start over"
        )
    if not files.live and not Path(files.out).absolute().parent.is_dir():
        raise ConfigError(f"{files.out}: its folder does not exist")
    return files


def _is_pipe(path: str) -> bool:
    return os.path.exists(path) and not os.path.isdir(path)


def run(
    files: Files,
    open_client: Callable[[], Client],
    *,
    parallel: int,
    defaults: ParamDict,
    model: str,
    settings: tuple[object, ...],
    reasoning: bool = True,
) -> int:
    """Run the batch. Returns 0 when every job succeeded, else 1.

    Raises:
        ConfigError: the files do not go together, or another batch writes to the output.
        KeyboardInterrupt: after the way to go on was said.
    """
    source = open_source(files.source, files.out)
    screen = Screen(interactive=sys.stderr.isatty())
    with ExitStack() as stack:
        stack.callback(os.close, source)
        journal = None
        if not files.live:
            journal = Journal(Path(files.out), settings_hash(settings, defaults), resume=files.resume)
            stack.callback(journal.close)
            _say_resume(files, journal, screen)
        sink = PipeSink(sys.stdout.buffer) if journal is None else FileSink(journal)
        try:
            progress = stack.enter_context(BatchProgress(_size(files.source)))
            batch = Batch(
                stack.enter_context(open_client()), sink, parallel=parallel, defaults=defaults, model=model,
                stream=files.stream, reasoning=reasoning, live=files.live, on_change=progress.update,
            )  # fmt: skip
            counts = batch.run(source)
        except BaseException:
            _say_kept(files, journal, screen)
            raise
        if journal is not None and isinstance(sink, FileSink):
            journal.publish(iter(sink.lines))
    _say_end(counts, screen)
    return 1 if counts.failed else 0


def _size(source: str) -> int | None:
    return os.path.getsize(source) if source != "-" and os.path.isfile(source) else None


def _say_resume(files: Files, journal: Journal, screen: Screen) -> None:
    if files.resume and journal.fresh:
        screen.notice(f"nothing to resume in {journal.path}; starting with the first line")
    if journal.stale:
        screen.notice(f"{journal.stale} records were made with other settings or another model; made again")


def _say_kept(files: Files, journal: Journal | None, screen: Screen) -> None:
    if journal is not None and not journal.empty:
        screen.notice(
            f"stopped; finished records are kept in {journal.path}. "
            f"To go on: slotd batch {files.source} -o {files.out} --resume (and the same other flags)"
        )


def _say_end(counts: Counts, screen: Screen) -> None:
    if counts.failed:
        screen.notice(f"{counts.failed} of {counts.done + counts.taken} jobs failed; their records say why")
    elif screen.interactive:
        screen.notice(f"{counts.done} jobs done, {counts.taken} taken, {counts.tokens} tokens generated")
