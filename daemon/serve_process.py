"""A daemon whose engine side is a process of its own.

That process is started before this one loads NumPy and the front, so both load at the same time.
"""

from __future__ import annotations

from slotd.daemon.arena_directory import default_budget, make_arena
from slotd.daemon.config import Config
from slotd.daemon.engine_process import EngineProcess, SharedMemory
from slotd.daemon.shared_state import SharedState


def serve(config: Config, stdout_fd: int) -> int:
    """Run the daemon until it ends; returns the exit code.

    Raises:
        ModelError, ConfigError: the model cannot be loaded as configured.
        SlotdError: the engine process died before it had loaded the model.
    """
    shared = SharedState()
    budget = default_budget() if config.host_cache is None else config.host_cache
    memory = SharedMemory(shared.descriptor, make_arena(budget), budget)
    process = EngineProcess(config, memory, epoch=0, replacements=0)
    from slotd.daemon.assembly import Daemon
    from slotd.daemon.process_host import ProcessHost

    host = ProcessHost(config, shared, memory, process)
    daemon = Daemon(config, host.open(), host.connect, stdout_fd)
    return daemon.run()
