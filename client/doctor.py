"""``slotd doctor``: what slotd finds on this machine, and whether it can generate five tokens."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slotd.client.failure import EXIT_FAILED, exit_code
from slotd.client.versions import cupy_version, version_of
from slotd.protocol.errors import SlotdError
from slotd.protocol.version import PROTOCOL_VERSION, __version__

if TYPE_CHECKING:
    from slotd.client.client import Client

Facts = dict[str, Any]

#: What cannot be said without a daemon.
NO_DAEMON = "unknown, because no daemon could be started"

SELF_TEST_TEXT = "The quick brown fox"
SELF_TEST_TOKENS = 5


def run(find_model: Callable[[], Path], open_client: Callable[[Path], Client], *, as_json: bool) -> int:
    """Examine and print. Returns 0 when the self-test passed, else the exit code of what went wrong."""
    facts = examine(find_model, open_client)
    if as_json:
        print(json.dumps(facts, ensure_ascii=False, indent=1))
    else:
        from slotd.client.render import print_facts

        print_facts(rows(facts))
    test = facts["self_test"]
    return 0 if test["ok"] else int(test.get("exit_code", EXIT_FAILED))


def examine(find_model: Callable[[], Path], open_client: Callable[[Path], Client]) -> Facts:
    """All facts. A model or daemon that cannot be used is a fact too, named in the self-test."""
    facts: Facts = {
        "versions": versions(),
        "cpu": cpu(),
        "memory": memory(),
        "model": None,
        "backend": None,
    }
    try:
        path = find_model()
        facts["model"] = {"path": str(path), "bytes": path.stat().st_size}
        with open_client(path) as client:
            facts["backend"] = client.hello.get("backend")
            facts["model"] |= client.hello.get("model", {})
            facts["max_ctx"] = client.hello.get("max_ctx")
            facts["self_test"] = self_test(client)
    except (SlotdError, OSError) as error:
        code = exit_code(error) if isinstance(error, SlotdError) else EXIT_FAILED
        facts["self_test"] = {"ok": False, "error": str(error), "exit_code": code}
    facts["device"] = device(facts["backend"] or {}, facts["self_test"].get("error"))
    return facts


def self_test(client: Client) -> Facts:
    """Five greedy tokens, twice: both times five, and the same."""
    start = time.perf_counter()
    options: Mapping[str, Any] = {"max_tokens": SELF_TEST_TOKENS, "temperature": 0.0, "ignore_eos": True}
    answers = [client.generate(SELF_TEST_TEXT, **options) for _ in range(2)]
    found: Facts = {
        "ok": False,
        "prompt": SELF_TEST_TEXT,
        "text": answers[0].text,
        "ids": list(answers[0].ids),
        "seconds": round(time.perf_counter() - start, 3),
    }
    if len(answers[0].ids) != SELF_TEST_TOKENS:
        return found | {"error": f"{len(answers[0].ids)} tokens came, not {SELF_TEST_TOKENS}"}
    if answers[0].ids != answers[1].ids:
        return found | {"error": f"the same greedy prompt gave {list(answers[1].ids)} the second time"}
    return found | {"ok": True}


def versions() -> Facts:
    packages = ("numpy", "gguf", "tokenizers", "jinja2", "click", "rich", "prompt_toolkit")
    return {
        "slotd": __version__,
        "protocol": PROTOCOL_VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cupy": cupy_version(),
        **{name: version_of(name) for name in packages},
    }


def device(backend: Mapping[str, Any], failure: str | None = None) -> Facts:
    """The accelerator that the daemon computes on, or why there is none.

    Args:
        backend: what the daemon says of itself; empty when there is no daemon.
        failure: why there is none.
    """
    if "device" in backend:
        return {"name": backend["device"], **{name: backend.get(name) for name in _DEVICE_FACTS}}
    if not backend and failure is not None and failure.startswith("--device "):
        reason = failure
    elif cupy_version() is None and importlib.util.find_spec("cupy") is None:
        reason = "CuPy is not installed, so everything runs on NumPy"
    elif backend:
        reason = "CuPy is installed; CUDA found no device, or --device said cpu"
    else:
        reason = NO_DAEMON
    return {"name": None, "reason": reason}


_DEVICE_FACTS = ("compute_capability", "driver", "memory_free", "memory_total")


def cpu() -> Facts:
    import numpy as np

    blas: Mapping[str, Any] = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    set_by = next((name for name in _THREAD_VARIABLES if os.environ.get(name)), None)
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "blas": f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip(),
        "blas_threads": f"{os.environ[set_by]} ({set_by})" if set_by else "as many as there are cores",
    }


_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


def memory() -> Facts:
    import psutil

    found = psutil.virtual_memory()
    return {"total": found.total, "available": found.available}


def rows(facts: Facts) -> list[tuple[str, str]]:
    """The facts as lines for a person."""
    versions, cpu, memory, test = facts["versions"], facts["cpu"], facts["memory"], facts["self_test"]
    model, backend = facts["model"] or {}, facts["backend"] or {}
    shown = [
        ("slotd", f"{versions['slotd']}, protocol {versions['protocol']}, Python {versions['python']}"),
        ("packages", ", ".join(f"{name} {versions[name]}" for name in ("numpy", "gguf", "tokenizers"))),
        ("CuPy", versions["cupy"] or "not installed"),
        ("device", _device_words(facts["device"])),
        ("backend", f"{backend.get('name')}, math {backend.get('math')}" if backend else NO_DAEMON),
        ("CPU", f"{cpu['cores']} cores; BLAS {cpu['blas']}, threads: {cpu['blas_threads']}"),
        ("memory", f"{_gib(memory['available'])} available of {_gib(memory['total'])}"),
        ("model", model.get("path", "none")),
    ]
    if "identity" in model:
        shown += [
            ("", f"{model.get('name')} ({model.get('arch')}), {model['bytes'] / 1e6:.0f} MB"),
            ("identity", str(model["identity"])),
            ("context", f"{facts['max_ctx']} tokens"),
        ]
    result = f"ok: {test['text']!r} in {test['seconds']} s" if test["ok"] else f"FAILED: {test['error']}"
    return [*shown, ("self-test", result)]


def _device_words(device: Facts) -> str:
    if device["name"] is None:
        return f"none: {device['reason']}"
    memory = f"{_gib(device['memory_free'])} free of {_gib(device['memory_total'])}"
    capability, driver = device["compute_capability"], device["driver"]
    return f"{device['name']}, compute capability {capability}, CUDA {driver}, {memory}"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
