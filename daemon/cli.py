"""The daemon's command line: the source daemon's flags, and slotd's own."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from slotd.daemon.cli_drafts import choose_spec, draft_options
from slotd.daemon.cli_errors import Command, Group, naming_variable
from slotd.daemon.config import (
    DEFAULT_CHECKPOINT_EVERY,
    Config,
    Inactive,
    default_engine,
    device_for,
    parse_host_cache,
    parse_size,
    parse_stream_fd,
    source_trim_tokens,
    split_arguments,
)
from slotd.daemon.log import check_descriptor, fill_standard_descriptors, guard_stdout, setup_logging
from slotd.daemon.source_environment import source_settings
from slotd.protocol.errors import ConfigError, ModelError, SlotdError

EXIT_FAILED, EXIT_USAGE, EXIT_MODEL = 1, 2, 3

#: What -ctk and -ctv take.
KV_TYPES = "f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0 or tq3_0"

#: Where a flag of the source or of a later version has no effect yet, and why.
NO_DEVICE_CHOICE = "--device chooses the device"
NO_WINDOW = "full attention is used; sliding windows are not in this version"
ONE_ROLLBACK = "the path that a tree is left on is committed in one way"
ONE_CALL = "the rows of a tree are computed in one call"
OWN_WINDOWS = "the draft's file says how far its layers see"

INACTIVE_FLAGS = {
    "fast_rollback": ONE_ROLLBACK,
    "seq_verify": ONE_CALL,
    "draft_swa": OWN_WINDOWS,
    "fa_window": NO_WINDOW,
    "target_gpu": NO_DEVICE_CHOICE,
    "draft_gpu": NO_DEVICE_CHOICE,
}

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(cls=Group, context_settings=CONTEXT)
def main() -> None:
    """The slotd engine process. `slotd daemon`, `inspect` and `convert-draft` end up here."""


@main.command(cls=Command, context_settings=CONTEXT)
@click.argument("arguments", nargs=-1, metavar="[TARGET [DRAFT [PROMPT.bin N OUT.bin]]]")
@click.option(
    "-m", "--model", "model", envvar="SLOTD_MODEL", metavar="FILE", help="Target GGUF, instead of TARGET."
)
@click.option(
    "--daemon", "as_daemon", is_flag=True, help="Serve the line protocol (the default without PROMPT.bin)."
)
@click.option(
    "-c", "--max-ctx", type=int, envvar="SLOTD_MAX_CTX", help="Positions per sequence [default: the model's]."
)
@click.option(
    "--chunk",
    type=int,
    envvar="SLOTD_CHUNK",
    help="Longest prefill piece, in tokens [default: 2048 on a GPU, 128 on the CPU].",
)
@click.option(
    "-np",
    "--parallel",
    "--max-concurrency",
    "parallel",
    type=int,
    default=4,
    show_default=True,
    envvar="SLOTD_PARALLEL",
    help="Most requests that run at once.",
)
@click.option(
    "--slots", "--prefix-cache-slots", "slots", type=int, default=8, show_default=True, envvar="SLOTD_SLOTS",
    help="Snapshot slots, at most 64.",
)  # fmt: skip
@click.option(
    "--slot-dir",
    envvar="SLOTD_SLOT_DIR",
    metavar="DIR",
    help="Folder of snapshots on disk (SNAPSHOT tier=disk); made when it is not there.",
)
@click.option(
    "--slot-bytes",
    envvar="SLOTD_SLOT_BYTES",
    metavar="SIZE",
    help="Most bytes in --slot-dir; those used least recently go [default: no limit].",
)
@click.option(
    "-ctk",
    "--cache-type-k",
    "k_type",
    envvar="SLOTD_CACHE_TYPE_K",
    help=f"Type of cached keys: {KV_TYPES} [default: f16 on a GPU, f32 on the CPU].",
)
@click.option(
    "-ctv",
    "--cache-type-v",
    "v_type",
    envvar="SLOTD_CACHE_TYPE_V",
    help=f"Type of cached values: {KV_TYPES} [default: as for keys].",
)
@click.option(
    "--exact",
    is_flag=True,
    envvar="SLOTD_EXACT",
    help="The bits of a token do not depend on what is computed beside it. Slower.",
)
@click.option(
    "--math",
    envvar="SLOTD_MATH",
    metavar="MODE",
    help="How a GPU multiplies weights: exact (bits as with --exact), q8 (in decoding, activations as 8-bit "
    "numbers: faster for one sequence, less accurate; bits as with --exact) or fast (long prompts with "
    "cuBLAS: bits depend on the pieces of a prompt) [default: exact].",
)
@click.option(
    "--memory-limit", envvar="SLOTD_MEMORY_LIMIT", metavar="SIZE", help="Most device memory, e.g. 4GiB."
)
@click.option(
    "--oom-policy",
    default="ladder",
    show_default=True,
    envvar="SLOTD_OOM_POLICY",
    metavar="POLICY",
    help="What running out of memory costs: ladder gives up as little as it can, step by step, and goes on; "
    "seed frees all slots and ends the request.",
)
@click.option(
    "--host-cache",
    envvar="SLOTD_HOST_CACHE",
    metavar="SIZE",
    help="Host memory for slots that had to leave the device, 0 = none [default: a quarter of what is free].",
)
@click.option(
    "--prefill-pool-trim-tokens",
    "trim_tokens",
    type=int,
    envvar="SLOTD_PREFILL_POOL_TRIM_TOKENS",
    metavar="N",
    help="In a long prompt, release cached memory blocks every N tokens, 0 = never [default: 0]. Each trim "
    "waits for the device and makes it set up its buffers again: below some thousand tokens it costs time. "
    "Never run with several devices or with a virtual-memory pool (there it does nothing).",
)
@click.option(
    "--checkpoint-every",
    type=int,
    default=DEFAULT_CHECKPOINT_EVERY,
    show_default=True,
    envvar="SLOTD_CHECKPOINT_EVERY",
    metavar="N",
    help="Models with recurrent layers: keep the state of a running request every N tokens, the last "
    "four of each, for a later request that shares a part of its text; 0 = never. No slot is needed for it.",
)
@click.option(
    "--engine",
    envvar="SLOTD_ENGINE",
    metavar="HOST",
    help="What runs the model: a thread, or a process of its own that is replaced when it dies "
    "[default: thread on the CPU, process on a GPU].",
)
@click.option(
    "--engine-timeout",
    type=float,
    default=60.0,
    show_default=True,
    envvar="SLOTD_ENGINE_TIMEOUT",
    metavar="S",
    help="Replace an engine process that shows no sign of life for so long, in seconds; five times as long "
    "while it loads.",
)
@click.option(
    "--idle-unload",
    type=float,
    envvar="SLOTD_IDLE_UNLOAD",
    metavar="S",
    help="Unload the weights when nothing has run or waited for so long, in seconds; slots stay, and the "
    "next request that needs the weights has them loaded again [default: never].",
)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    envvar="SLOTD_DEVICE",
    metavar="DEVICE",
    help="Where to compute: cpu, the number of a CUDA device, or auto: the first of them if there is one.",
)
@click.option(
    "--backend",
    default="auto",
    show_default=True,
    envvar="SLOTD_BACKEND",
    help="auto, cuda or numpy: what --device must lead to.",
)
@click.option(
    "--pool",
    default="legacy",
    show_default=True,
    envvar="SLOTD_POOL",
    metavar="POOL",
    help="What keeps freed memory of a CUDA device: legacy (CuPy's pool) or vmm (the driver's).",
)
@click.option(
    "--stream-fd", metavar="FD", help="Inherited descriptor for token ids, or - for [tok] lines on stdout."
)
@click.option(
    "--max-line", default="16MiB", show_default=True, envvar="SLOTD_MAX_LINE", metavar="SIZE",
    help="Longest command line.",
)  # fmt: skip
@click.option(
    "--max-stall",
    type=float,
    default=60.0,
    show_default=True,
    envvar="SLOTD_MAX_STALL",
    metavar="MS",
    help="Longest gap a prefill piece should put into another answer, in milliseconds.",
)
@click.option(
    "--stall-timeout",
    type=float,
    default=60.0,
    show_default=True,
    envvar="SLOTD_STALL_TIMEOUT",
    metavar="S",
    help="Cancel a request whose reader has taken nothing for so long, in seconds.",
)
@click.option(
    "--state-dir",
    envvar="SLOTD_STATE_DIR",
    metavar="DIR",
    help="Folder of the file PID.json in which this daemon shows its state to `slotd top`, - = none "
    "[default: slotd's in the user's runtime folder].",
)
@click.option("-v", "--verbose", count=True, help="More log on stderr (-vv: everything).")
@draft_options
@click.option("--fast-rollback", is_flag=True, help=f"Accepted; {ONE_ROLLBACK}.")
@click.option("--seq-verify", is_flag=True, help=f"Accepted; {ONE_CALL}.")
@click.option("--draft-swa", type=click.IntRange(0), help=f"Accepted; {OWN_WINDOWS}.")
@click.option("--fa-window", type=click.IntRange(0), help=f"Accepted; {NO_WINDOW}.")
@click.option("--target-gpu", "--target-gpus", "target_gpu", help=f"Accepted; {NO_DEVICE_CHOICE}.")
@click.option("--draft-gpu", help=f"Accepted; {NO_DEVICE_CHOICE}.")
def daemon(arguments: tuple[str, ...], **flags: Any) -> None:
    """Serve TARGET over the line protocol (see PROTOCOL.md), or answer PROMPT.bin once.

    The one-shot form reads raw little-endian int32 ids from PROMPT.bin, generates N ids and writes them to
    OUT.bin; its exit code is 1 at the first failure.
    """
    fill_standard_descriptors()
    setup_logging(flags["verbose"])
    _run(lambda: _daemon(arguments, flags), flags["verbose"])


def _daemon(arguments: tuple[str, ...], flags: dict[str, Any]) -> int:
    try:
        return _serve(arguments, flags)
    except ConfigError as error:
        raise naming_variable(error) from error


def _serve(arguments: tuple[str, ...], flags: dict[str, Any]) -> int:
    target, draft, once = split_arguments(arguments, flags["as_daemon"])
    config = make_config(target, draft, flags)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # until the loop has handlers of its own
        signal.signal(number, lambda *_: os._exit(0))
    if isinstance(config.stream_fd, int):
        check_descriptor(config.stream_fd)  # before anything of ours is opened and takes its number
    stdout_fd = guard_stdout()  # before the libraries below: one of them might print when it is imported
    if once is not None:
        from slotd.daemon.serve import run_once

        return run_once(config, stdout_fd, *once)
    if config.inactive:
        listed = ", ".join(str(inactive) for inactive in config.inactive)
        print(f"slotd: not active in this version: {listed}", file=sys.stderr, flush=True)
    if config.engine == "process":
        from slotd.daemon.serve_process import serve
    else:
        from slotd.daemon.serve import serve
    code = serve(config, stdout_fd)
    from slotd.daemon.loop import end_process

    end_process(code)
    return 0


def make_config(target: str | None, draft: str | None, flags: dict[str, Any]) -> Config:
    """The checked configuration.

    Raises:
        ConfigError: naming the flag and what is allowed.
    """
    model = target or flags["model"]
    if not model:
        raise ConfigError(
            "no model: give TARGET, -m FILE or SLOTD_MODEL (`slotd fetch` gets the default one)"
        )
    device = device_for(flags["backend"], flags["device"])
    stream_fd, limit = flags["stream_fd"], flags["memory_limit"]
    slot_dir, slot_bytes = flags["slot_dir"], flags["slot_bytes"]
    trim_tokens = flags["trim_tokens"]
    if trim_tokens is None:
        trim_tokens, warning = source_trim_tokens(os.environ)
        if warning:
            print(f"slotd: {warning}", file=sys.stderr, flush=True)
    source = source_settings(os.environ)
    return Config(
        model=Path(model), max_ctx=flags["max_ctx"],
        chunk=source.chunk if flags["chunk"] is None else flags["chunk"],
        k_type=flags["k_type"] or source.k_type, v_type=flags["v_type"] or source.v_type,
        parallel=flags["parallel"], slots=flags["slots"], exact=flags["exact"],
        math=flags["math"],
        device=device, pool=flags["pool"],
        memory_limit=None if limit is None else parse_size("--memory-limit", limit),
        slot_dir=Path(slot_dir) if slot_dir else None,
        slot_bytes=None if slot_bytes is None else parse_size("--slot-bytes", slot_bytes),
        stream_fd=None if stream_fd is None else parse_stream_fd(stream_fd),
        max_line=parse_size("--max-line", flags["max_line"]), max_stall=flags["max_stall"] / 1000,
        stall_timeout=flags["stall_timeout"], oom_policy=flags["oom_policy"],
        host_cache=parse_host_cache(flags["host_cache"]), trim_tokens=trim_tokens,
        checkpoint_every=flags["checkpoint_every"],
        state_dir=flags["state_dir"], engine=flags["engine"] or default_engine(device),
        engine_timeout=flags["engine_timeout"], idle_unload=flags["idle_unload"],
        draft=draft or flags["draft"] or None, spec=choose_spec(flags),
        budget=flags["budget"], draft_block=flags["draft_block"], draft_ctx=flags["draft_ctx"],
        tree_temperature=flags["ddtree_temp"], chain_seed=flags["chain_seed"],
        inactive=collect_inactive(flags),
    )  # fmt: skip


def collect_inactive(flags: dict[str, Any]) -> tuple[Inactive, ...]:
    """What was asked for and has no effect in this version."""
    found = []
    for name, reason in INACTIVE_FLAGS.items():
        value = flags[name]
        if value is None or value is False or (name == "fa_window" and value == 0):
            continue  # not asked for; a window of 0 is full attention
        found.append(Inactive("--" + name.replace("_", "-"), "" if value is True else str(value), reason))
    return tuple(found)


@main.command(cls=Command, context_settings=CONTEXT)
@click.argument("file", type=click.Path(), metavar="[FILE]")
@click.option(
    "-c", "--ctx", "--max-ctx", "ctx", type=int, envvar="SLOTD_MAX_CTX",
    help="Context length for the memory figures [default: the model's].",
)  # fmt: skip
@click.option(
    "-ctk", "--cache-type-k", "k_type", default="f32", show_default=True, envvar="SLOTD_CACHE_TYPE_K",
    help=f"Type of cached keys: {KV_TYPES}.",
)  # fmt: skip
@click.option(
    "-ctv", "--cache-type-v", "v_type", default="f32", show_default=True, envvar="SLOTD_CACHE_TYPE_V",
    help=f"Type of cached values: {KV_TYPES}.",
)  # fmt: skip
@click.option(
    "--memory-limit", envvar="SLOTD_MEMORY_LIMIT", metavar="SIZE",
    help="Memory of the daemon that the figures are compared with [default: this machine's].",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("-v", "--verbose", count=True, help="More log on stderr, and where a failure came from.")
def inspect(file: str, as_json: bool, verbose: int, **flags: Any) -> None:
    """Print what a GGUF file is, what it needs, and whether slotd can run it (exit code 3 when not).

    Without FILE `slotd inspect` takes the default model.
    """
    setup_logging(verbose)
    _run(lambda: _inspect(file, as_json, flags), verbose)


def _inspect(file: str, as_json: bool, flags: dict[str, Any]) -> int:
    from slotd.daemon.kv.numpy_need import numpy_need
    from slotd.daemon.weights.inspection import inspect_file

    limit = flags["memory_limit"]
    try:
        report = inspect_file(
            file, numpy_need, ctx=flags["ctx"], k_type=flags["k_type"], v_type=flags["v_type"],
            memory_limit=None if limit is None else parse_size("--memory-limit", limit),
        )  # fmt: skip
    except ConfigError as error:
        raise naming_variable(error) from error
    click.echo(report.to_json() if as_json else report.to_text())
    return 0 if report.runnable else EXIT_MODEL


@main.command(cls=Command, context_settings=CONTEXT)
@click.argument("source", type=click.Path(path_type=Path), metavar="IN")
@click.option(
    "-o", "--out", required=True, type=click.Path(path_type=Path), metavar="OUT.gguf",
    help="The file to write; one that is there is replaced when the new one is whole.",
)  # fmt: skip
@click.option(
    "--type", "matrices", default="q8_0", show_default=True, metavar="TYPE",
    help="How matrices are stored: q8_0 or f16. Tables are f16 in either case, vectors f32.",
)  # fmt: skip
@click.option("-v", "--verbose", count=True, help="Where a failure came from.")
def convert_draft(source: Path, out: Path, matrices: str, verbose: int) -> None:
    """Convert a checkpoint of a DFlash, DFlash2 or DSpark draft (safetensors) to GGUF.

    IN is a folder with config.json and .safetensors files, or one such file with config.json beside it.
    """
    setup_logging(verbose)
    _run(lambda: _convert_draft(source, out, matrices), verbose)


def _convert_draft(source: Path, out: Path, matrices: str) -> int:
    from slotd.daemon.weights import convert_draft as conversion

    done = conversion.convert_draft(source, out, matrices)
    numbers = f"{done.tensors} tensors, {done.parameters:,} parameters, {done.bytes:,} bytes"
    click.echo(f"{out}: {done.kind} draft, {numbers}")
    return 0


def _run(work: Callable[[], int], verbosity: int) -> None:
    """Run, and turn a typed error into one line on stderr and its exit code."""
    try:
        code = work()
    except SlotdError as error:
        if verbosity:
            traceback.print_exc()
        print(f"slotd: {error}", file=sys.stderr)
        code = {ConfigError: EXIT_USAGE, ModelError: EXIT_MODEL}.get(type(error), EXIT_FAILED)
    sys.exit(code)
