"""Puts a daemon together from its configuration, or runs one prompt without one."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slotd.daemon.config import Config
from slotd.daemon.device_backend import open_backend
from slotd.daemon.door import Limits, admit_prompt
from slotd.daemon.engine import Engine
from slotd.daemon.front import Front
from slotd.daemon.host import EngineHost
from slotd.daemon.kv.host_tier import default_budget
from slotd.daemon.kv.slot_store import SlotStore
from slotd.daemon.link import Emit, Finished, Flags, State, Stop, Submit, ToFront
from slotd.daemon.loop import Loop
from slotd.daemon.memory import Faults, OutOfDeviceMemory, Policy
from slotd.daemon.memory.pressure import EMBED
from slotd.daemon.outbox import Outbox
from slotd.daemon.prompt_files import write_ids
from slotd.daemon.scheduler import Scheduler
from slotd.daemon.state_file import StateFile, choose_folder
from slotd.daemon.weights.reader import open_model
from slotd.protocol.connection import DaemonConnection
from slotd.protocol.errors import CODES, ConfigError, RequestError
from slotd.protocol.grammar import VERBS
from slotd.protocol.messages import Prompt, Ready
from slotd.protocol.version import PROTOCOL_VERSION, __version__

log = logging.getLogger(__name__)

FLOAT32_BYTES = 4


def build_engine(config: Config) -> Engine:
    """Load the model and make an engine.

    Raises:
        ModelError: the file cannot be used.
        ConfigError: a setting does not fit the model.
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
            host_cache=default_budget() if config.host_cache is None else config.host_cache,
        )
    except OutOfDeviceMemory as error:
        limit = f"--memory-limit {config.memory_limit}" if config.memory_limit else "the device's memory"
        needed = "the weights"
        if backend.name == "numpy":
            needed = f"the weights need {FLOAT32_BYTES * model.n_parameters} bytes as float32"
        raise ConfigError(
            f"{config.model}: {needed} do not fit; {limit} had {error.free} bytes left"
        ) from error
    log.info("%s loaded in %.1f s", config.model, time.monotonic() - began)
    return engine


def serve(config: Config, stdout_fd: int) -> int:
    """Run a daemon on stdin and `stdout_fd` until it ends; returns the exit code."""
    if config.inactive:
        listed = ", ".join(str(inactive) for inactive in config.inactive)
        print(f"slotd: not active in this version: {listed}", file=sys.stderr, flush=True)
    stream_fd = config.stream_fd if isinstance(config.stream_fd, int) else None
    state_folder = choose_folder(config.state_dir)
    engine = build_engine(config)
    daemon = _Daemon(config, engine, stdout_fd, stream_fd, state_folder)
    return daemon.run()


class _Daemon:
    """The parts of a daemon and the wires between them."""

    def __init__(
        self, config: Config, engine: Engine, stdout_fd: int, stream_fd: int | None, state_folder: Path | None
    ) -> None:
        hyper = engine.hyper
        connection = DaemonConnection(max_line=config.max_line)
        self.outbox = Outbox(stdout_fd, stream_fd, self._stdout_gone, self._stream_gone)
        store = None
        if config.slot_dir is not None:
            store = SlotStore(config.slot_dir, config.slot_bytes)
        scheduler = _scheduler(config, engine, self._deliver, Policy(config.oom_policy), store)
        self.host = EngineHost(scheduler, lambda: self.loop.request_end("the scheduler died", exit_code=1))
        self.front = Front(
            connection, self.outbox, self.host.send,
            Limits(
                n_vocab=hyper.n_vocab, max_ctx=engine.max_ctx, slots=config.slots, stored=store is not None
            ),
            props=_props(config, engine, store), lines_for_stream=config.stream_fd == "-",
            stall_timeout=config.stall_timeout,
        )  # fmt: skip
        self.loop = Loop(0, stdout_fd, connection, self.front, self.outbox, self.host, config.stall_timeout)
        self.state_file = None
        if state_folder is not None:
            self.state_file = StateFile(state_folder, self.front.props, self.front.status)

    def run(self) -> int:
        self.loop.install_signals()
        self.host.start()
        if self.state_file is not None:
            self.state_file.start()
        self.front.put(Ready())
        try:
            return self.loop.run()
        finally:
            if self.state_file is not None:
                self.state_file.close()

    def _deliver(self, message: ToFront) -> None:
        self.front.deliver(message)
        if self.state_file is not None and isinstance(message, State):
            self.state_file.changed()

    def _stdout_gone(self) -> None:
        self.loop.request_end("nobody reads stdout")

    def _stream_gone(self) -> None:
        self.front.stream_gone()


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

    scheduler = _scheduler(config, engine, deliver, Policy.ONCE)
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
    except RequestError as error:
        print(f"slotd: {error}", file=sys.stderr)
        return 1
    return 0


def _scheduler(
    config: Config, engine: Engine, deliver: Callable[[ToFront], None], policy: Policy,
    store: SlotStore | None = None,
) -> Scheduler:  # fmt: skip
    return Scheduler(
        engine, deliver, chunk=config.chunk or engine.backend.chunk, parallel=config.parallel,
        max_stall=config.max_stall, eos_ids=frozenset(engine.hyper.stop_ids), policy=policy,
        trim_tokens=config.trim_tokens, slot_store=store,
    )  # fmt: skip


def _props(config: Config, engine: Engine, store: SlotStore | None) -> Mapping[str, Any]:
    """What HELLO and PROPS say of this daemon."""
    hyper = engine.hyper
    return {
        "slotd": __version__,
        "protocol": list(range(1, PROTOCOL_VERSION + 1)),
        "pid": os.getpid(),
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
        "slot_dir": store and {
            "path": str(config.slot_dir), "budget": config.slot_bytes, "read_only": store.read_only
        },
        "parallel": config.parallel,
        "chunk": config.chunk or engine.backend.chunk,
        "limits": {"max_line": config.max_line, "memory": config.memory_limit},
        "effective": _effective(config, engine),
        "oom_policy": config.oom_policy,
        "pool": {"kind": engine.memory.pool_kind, "trim_tokens": config.trim_tokens},
        "verbs": [verb.name for verb in VERBS if verb.supported],
        "errors": sorted(CODES),
        "inactive": [{"name": i.name, "value": i.value, "reason": i.reason} for i in config.inactive],
    }  # fmt: skip


def _effective(config: Config, engine: Engine) -> Mapping[str, Any]:
    """What was asked for beside what the memory has room for, when every request and slot is max_ctx long."""
    capacity = engine.store.capacity()
    in_host = engine.host_tier.budget // engine.store.bytes_per_token
    return {
        "memory": {"requested": config.memory_limit, "effective": engine.memory.total},
        "host_cache": {"requested": config.host_cache, "effective": engine.host_tier.budget},
        "kv_tokens": {"effective": capacity},
        "parallel": {
            "requested": config.parallel, "effective": min(config.parallel, capacity // engine.max_ctx),
        },
        "slots": {
            "requested": config.slots,
            "effective": min(config.slots, capacity // engine.max_ctx + in_host // engine.max_ctx),
        },
    }  # fmt: skip
