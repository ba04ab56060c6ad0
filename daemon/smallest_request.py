"""Whether an engine that was just loaded has memory for any request at all."""

from __future__ import annotations

from slotd.daemon.engine import Engine
from slotd.daemon.kv.pages import PAGE, SEGMENT_PAGES
from slotd.daemon.memory import OutOfDeviceMemory
from slotd.daemon.rows import Kind, Rows
from slotd.protocol.errors import ConfigError

#: Beside the weights and a segment of K/V: with so much free nobody has to try.
AMPLE = 256 << 20


def check_smallest_request(engine: Engine, limit: int | None) -> None:
    """Try a prompt of one token and an answer of one, when there is little memory beside the weights.

    limit: `--memory-limit`, in bytes.

    Raises:
        ConfigError: it does not fit. The message names the need and the limit.
    """
    if engine.memory.free >= engine.store.segment_bytes + AMPLE:
        return
    with engine.memory.without_faults():
        failure = _try(engine)
        if failure is not None and engine.drafts:
            engine.drafting.give_up("beside it there is no memory for a request of one token")
            failure = _try(engine)
        if failure is None:
            return
        needed = _needed(engine, limit)
    weights, segment = engine.memory.live("weights"), engine.store.segment_bytes
    had = f"--memory-limit is {limit}" if limit is not None else f"the device has {engine.memory.total}"
    parts = f"{weights} for the weights, {segment} for {SEGMENT_PAGES * PAGE} tokens of K/V"
    raise ConfigError(
        f"not even a request of one token fits: it needs {needed} bytes ({parts}, and room to compute in), "
        f"and {had}"
    )


def _try(engine: Engine) -> OutOfDeviceMemory | None:
    """Run the request as the scheduler would, released caches and one more try included."""
    failure = None
    for _ in range(2):
        try:
            _run(engine)
            failure = None
        except OutOfDeviceMemory as error:
            failure = error.bare()
        engine.compact()
        if failure is None:
            break
    return failure


def _run(engine: Engine) -> None:
    sequence = engine.open()
    try:
        engine.reserve(sequence, 2 + PAGE)
        for kind in (Kind.PROMPT, Kind.STEP):
            outputs = engine.forward(Rows.chain(sequence, [0]), kind)
            outputs.greedy()
            engine.commit(sequence, [0])
    finally:
        engine.close(sequence)


def _needed(engine: Engine, limit: int | None) -> str:
    """Bytes that it takes: measured without the limit where that is possible."""
    memory, held = engine.memory, engine.memory.live() + engine.store.segment_bytes
    memory.limit = None
    try:
        _run(engine)
        held = max(held, memory.live() + memory.cached)
    except OutOfDeviceMemory:
        return f"more than {held}"
    finally:
        memory.limit = limit
        engine.compact()
    return f"about {held}"
