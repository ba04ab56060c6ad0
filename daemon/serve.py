"""Puts the engine side together from the configuration, and a daemon around it or one prompt through it."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from slotd.daemon.arena_directory import default_budget, make_arena
from slotd.daemon.assembly import Daemon
from slotd.daemon.config import Config
from slotd.daemon.device_backend import open_backend
from slotd.daemon.door import Limits, admit_prompt
from slotd.daemon.draft_choice import DraftChoice, choose_drafts, draft_path
from slotd.daemon.engine import Engine
from slotd.daemon.host import EngineHost
from slotd.daemon.kv.host_arena import HostArena, open_arena
from slotd.daemon.kv.slot_store import SlotStore
from slotd.daemon.link import Emit, Finished, Flags, Opened, Stop, Submit, ToFront
from slotd.daemon.memory import DeviceLost, Faults, OutOfDeviceMemory, Policy
from slotd.daemon.memory.pressure import EMBED
from slotd.daemon.prompt_files import write_ids
from slotd.daemon.scheduler import Scheduler
from slotd.daemon.smallest_request import check_smallest_request
from slotd.daemon.weights.reader import open_model
from slotd.protocol.errors import CODES, ConfigError, RequestError
from slotd.protocol.grammar import VERBS
from slotd.protocol.messages import Prompt
from slotd.protocol.version import PROTOCOL_VERSION, __version__

log = logging.getLogger(__name__)

FLOAT32_BYTES = 4


def build_engine(config: Config, arena: HostArena | None = None) -> Engine:
    """Load the model and make an engine.

    arena: the memory of the host tier; None: ordinary memory, of the size that is configured.

    Raises:
        ModelError: the file cannot be used.
        ConfigError: a setting does not fit the model, or the memory is too small for any request.
    """
    began = time.monotonic()
    model = open_model(config.model)
    max_ctx = config.max_ctx if config.max_ctx is not None else model.hyper.n_ctx_train
    if max_ctx > model.hyper.n_ctx_train:
        log.warning("--max-ctx %d is beyond the %d positions the model was trained for; answers may degrade",
                    max_ctx, model.hyper.n_ctx_train)  # fmt: skip
    backend = open_backend(config, Faults.parse(os.environ.get("SLOTD_FAULT")))
    try:
        engine = Engine(
            model,
            backend,
            max_ctx=max_ctx,
            k_type=config.k_type,
            v_type=config.v_type,
            n_slots=config.slots,
            host_cache=host_budget(config) if arena is None else arena.budget,
            arena=arena,
            checkpoint_every=config.checkpoint_every,
            draft=draft_path(config, model.identity),
            draft_ctx=config.draft_ctx,
        )
    except OutOfDeviceMemory as error:
        limit = f"--memory-limit {config.memory_limit}" if config.memory_limit else "the device's memory"
        needed = "the weights do not fit"
        if backend.name == "numpy":
            needed += f", they need {FLOAT32_BYTES * model.n_parameters} bytes as float32"
        raise ConfigError(
            f"{config.model}: {needed}; when the next one had no room, {limit} had {error.free} bytes left"
        ) from error
    check_smallest_request(engine, config.memory_limit)
    log.info("%s loaded in %.1f s", config.model, time.monotonic() - began)
    return engine


def host_budget(config: Config) -> int:
    """Bytes of the host tier."""
    return default_budget() if config.host_cache is None else config.host_cache


def open_engine_side(
    config: Config, deliver: Callable[[ToFront], None], arena: HostArena | None, *,
    flush: Callable[[], None] = lambda: None, epoch: int = 0,
) -> tuple[Scheduler, Opened]:  # fmt: skip
    """Load the model: a scheduler that is ready to run, and what the front has to know.

    arena: the memory of the host tier; what another process left in it is adopted.

    Raises:
        ModelError, ConfigError: as `build_engine`.
    """
    engine = build_engine(config, arena)
    engine.host_tier.adopt()

    def deliver_recorded(message: ToFront) -> None:
        if not isinstance(message, Emit):  # nobody is told of a slot that the arena does not know of
            engine.host_tier.record()
        deliver(message)

    store = None if config.slot_dir is None else SlotStore(config.slot_dir, config.slot_bytes)
    drafts = choose_drafts(config, engine)
    _say(config, engine, drafts)
    scheduler = _scheduler(
        config, engine, deliver_recorded, Policy(config.oom_policy), drafts, store, flush, epoch
    )
    props = {**_props(config, engine, store), "speculation": drafts.report(config, engine)}
    return scheduler, Opened(engine.hyper.n_vocab, engine.max_ctx, store is not None, props)


def serve(config: Config, stdout_fd: int) -> int:
    """Run a daemon that hosts the engine side by a thread; returns the exit code."""
    budget = host_budget(config)
    arena = open_arena(make_arena(budget), budget, recorded=False)
    scheduler, opened = open_engine_side(config, lambda message: daemon.deliver(message), arena)
    daemon = Daemon(
        config, opened,
        lambda _, end: EngineHost(scheduler, lambda: end("the scheduler died", 1)), stdout_fd,
    )  # fmt: skip
    return daemon.run()


def run_once(config: Config, stdout_fd: int, prompt_path: str, n_gen: int, out_path: str) -> int:
    """The source's one-shot form: raw ids in, the generated ids out, exit code 1 at the first failure.

    When memory runs out `[snap] all-cleared` is printed before the end, as the source does, although there
    is no slot that could go; not for the embedding (S120).
    """
    engine = build_engine(config)
    produced: list[int] = []
    ended: list[Finished] = []

    def deliver(message: ToFront) -> None:
        if isinstance(message, Emit):
            produced.extend(message.ids)
        elif isinstance(message, Finished):
            ended.append(message)
            scheduler.put(Stop())

    scheduler = _scheduler(config, engine, deliver, Policy.ONCE, choose_drafts(config, engine))
    command = Prompt(path=prompt_path, n_gen=n_gen)
    limits = Limits(n_vocab=engine.hyper.n_vocab, max_ctx=engine.max_ctx, slots=config.slots)
    try:
        ids = admit_prompt(command, limits)
        scheduler.put(Submit(1, command, Flags(), time.monotonic(), ids))
        scheduler.run()
        if ended[0].code == "oom" and ended[0].reason["site"] != EMBED:
            os.write(stdout_fd, b"[snap] all-cleared\n")
        if ended[0].code is not None:
            raise RequestError(ended[0].code, ended[0].reason)
        write_ids(out_path, produced, counted=False)
    except (RequestError, DeviceLost) as error:
        print(f"slotd: {error}", file=sys.stderr)
        return 1
    return 0


def _say(config: Config, engine: Engine, drafts: DraftChoice) -> None:
    """What is guessed from now on; loudly, where a draft that was asked for is not used."""
    modes = ", ".join(mode.value for mode in drafts.modes) or "off"
    missing = engine.drafting.path is not None and not engine.drafts
    if missing or (config.spec in ("chain", "tree") and not drafts.drafters):
        print(f"slotd: speculation: {modes} ({drafts.reason})", file=sys.stderr, flush=True)
    else:
        log.info("speculation: %s%s", modes, f" ({drafts.reason})" if drafts.reason else "")


def _scheduler(
    config: Config, engine: Engine, deliver: Callable[[ToFront], None], policy: Policy, drafts: DraftChoice,
    store: SlotStore | None = None, flush: Callable[[], None] = lambda: None, epoch: int = 0,
) -> Scheduler:  # fmt: skip
    return Scheduler(
        engine, deliver, chunk=config.chunk or engine.backend.chunk, parallel=config.parallel,
        max_stall=config.max_stall, eos_ids=frozenset(engine.hyper.stop_ids), policy=policy,
        trim_tokens=config.trim_tokens, slot_store=store, flush=flush, epoch=epoch,
        idle_unload=config.idle_unload, drafters=drafts.drafters, adapts=drafts.adapts,
    )  # fmt: skip


def _props(config: Config, engine: Engine, store: SlotStore | None) -> Mapping[str, Any]:
    """What HELLO and PROPS say of this daemon."""
    hyper = engine.hyper
    return {
        "slotd": __version__,
        "protocol": list(range(1, PROTOCOL_VERSION + 1)),
        "model": {
            "path": str(config.model.resolve()), "name": engine.model_name, "arch": hyper.arch,
            "identity": engine.identity, "n_vocab": hyper.n_vocab, "n_ctx_train": hyper.n_ctx_train,
            "eos_ids": sorted(hyper.stop_ids),
        },
        "backend": engine.backend.report(),
        "max_ctx": engine.max_ctx,
        "slots": config.slots,
        "kv": {
            "k": engine.k_type, "v": engine.v_type, "window": 0,
            "bytes_per_token": engine.store.bytes_per_token,
        },
        "recurrent": {
            "state_bytes": engine.recurrence.state_bytes, "checkpoint_every": config.checkpoint_every
        },
        "slot_dir": store and {
            "path": str(config.slot_dir), "budget": config.slot_bytes, "read_only": store.read_only
        },
        "parallel": config.parallel,
        "chunk": config.chunk or engine.backend.chunk,
        "limits": {"max_line": config.max_line, "memory": config.memory_limit},
        "effective": _effective(config, engine),
        "oom_policy": config.oom_policy,
        "idle_unload_s": config.idle_unload,
        "pool": {"kind": engine.memory.pool_kind, "trim_tokens": config.trim_tokens},
        "verbs": [verb.name for verb in VERBS if verb.supported],
        "errors": sorted(CODES),
        "inactive": [{"name": i.name, "value": i.value, "reason": i.reason} for i in config.inactive],
    }  # fmt: skip


def _effective(config: Config, engine: Engine) -> Mapping[str, Any]:
    """What was asked for beside what the memory has room for, when every request and slot is max_ctx long."""
    capacity, token_bytes = engine.store.capacity(), engine.store.bytes_per_token
    in_host = engine.host_tier.budget // token_bytes
    longest = engine.max_ctx - (-engine.recurrence.state_bytes // token_bytes)  # its state as so many tokens
    return {
        "memory": {"requested": config.memory_limit, "effective": engine.memory.total},
        "host_cache": {"requested": config.host_cache, "effective": engine.host_tier.budget},
        "kv_tokens": {"effective": capacity},
        "parallel": {
            "requested": config.parallel, "effective": min(config.parallel, capacity // longest),
        },
        "slots": {
            "requested": config.slots,
            "effective": min(config.slots, capacity // longest + in_host // longest),
        },
    }  # fmt: skip
