"""Who may import whom. Each rule has a sample that breaks it, so that a rule that sees nothing is noticed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.architecture.sources import PACKAGES, Import, Source, product_sources, sample, sources_of_tests

Rule = Callable[[Source], Iterator[str]]

#: Standard modules that touch the world: protocol/ says what may be said and does nothing.
INPUT_AND_OUTPUT = frozenset(
    {"asyncio", "fcntl", "http", "io", "logging", "mmap", "multiprocessing", "os", "pathlib", "select"}
    | {"selectors", "shutil", "signal", "socket", "ssl", "subprocess", "sys", "tempfile", "termios"}
    | {"threading", "time", "urllib"}
)

#: Library -> modules and folders that may import it; * stands for any letters.
CONFINED = {
    "click": ("slotd.client.cli", "slotd.daemon.cli", "slotd.daemon.cli_*"),
    "rich": ("slotd.client.render", "slotd.client.repl", "slotd.client.top"),
    "prompt_toolkit": ("slotd.client.render", "slotd.client.repl", "slotd.client.top"),
    "cupy": ("slotd.daemon.ops.cuda_*", "slotd.daemon.ops.kernels", "slotd.daemon.memory"),
    "cupy_backends": ("slotd.daemon.ops.kernels",),
}

#: The daemon from top to bottom. A unit is a module or folder directly under daemon/; it may import its own
#: layer and lower ones.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("__main__", "cli", "cli_drafts", "cli_errors"),
    ("child",),
    ("serve", "serve_process"),
    ("assembly", "process_host"),
    ("loop", "host"),
    ("handlers", "front", "outbox", "open_requests", "door", "prompt_files"),
    ("scheduler", "slot_commands", "disk_commands", "slot_chains", "background", "admission", "recovery")
    + ("inline_snapshots", "job", "next_token", "parking", "retained", "spilled_slots")
    + ("decoding", "draft_choice", "draft_sources", "drafts", "speculation", "walk"),
    ("smallest_request",),
    ("engine",),
    ("drafting", "recurrence"),
    ("device_backend",),
    ("numpy_backend", "cuda_backend"),
    ("numpy_draft", "cuda_draft"),
    ("cuda_runner",),
    ("cuda_steps", "cuda_errors"),
    ("backend",),
    ("models", "kv", "sampling"),
    ("ops",),
    ("memory", "weights"),
    ("engine_process", "engine_life", "in_flight", "slots_seen"),
    ("link_wire", "shared_state"),
    ("account", "arena_directory", "blas_threads", "config", "link", "log", "row_checks", "rows", "sequence")
    + (
        "candidates",
        "draft_rows",
        "drafters",
        "idle_unload",
        "source_environment",
        "spec",
        "state_file",
        "totals",
    ),
)

#: Units that may run in another process than the engine: they know it by the messages of `link` only.
FRONT = (
    *("loop", "handlers", "front", "outbox", "open_requests", "door", "prompt_files", "assembly"),
    *("serve_process", "process_host", "engine_process", "engine_life", "in_flight", "slots_seen"),
)
ENGINE = (
    *("scheduler", "slot_commands", "disk_commands", "slot_chains", "background", "admission", "recovery"),
    *(
        "inline_snapshots",
        "job",
        "next_token",
        "decoding",
        "draft_choice",
        "draft_sources",
        "drafts",
        "speculation",
        "walk",
        "parking",
        "candidates",
        "smallest_request",
        "retained",
        "spilled_slots",
        "engine",
        "recurrence",
        "backend",
        "numpy_backend",
        "cuda_backend",
        "cuda_runner",
        "cuda_steps",
        "device_backend",
    ),
    *("models", "kv", "sampling", "ops", "memory", "spec"),
)

#: Names that a file beside a script would shadow (``python daemon/cli.py`` puts daemon/ first on sys.path).
DEPENDENCIES = frozenset(
    {"click", "cupy", "gguf", "hypothesis", "jinja2", "numpy", "platformdirs", "prompt_toolkit", "psutil"}
    | {"pytest", "rich", "tokenizers"}
)


def no_relative_imports(source: Source) -> Iterator[str]:
    """A module has one name, written out."""
    for found in source.imports:
        if found.relative:
            yield f"{source.at(found.line)}: relative import of {found.target or found.name}"


def no_folder_names(source: Source) -> Iterator[str]:
    """``import daemon`` works from the root and loads a second copy of every class."""
    for found in source.imports:
        if not found.relative and found.target.partition(".")[0] in ("daemon", "client", "protocol"):
            yield f"{source.at(found.line)}: import of {found.target}, say slotd.{found.target}"


def protocol_is_pure(source: Source) -> Iterator[str]:
    """slotd.protocol imports the standard library and itself, and does no input or output."""
    if not _inside(source.module, "slotd.protocol"):
        return
    for found in source.imports:
        top = found.target.partition(".")[0]
        if found.reaches("slotd.protocol"):
            continue
        if top not in sys.stdlib_module_names:
            yield f"{source.at(found.line)}: protocol imports {found.target}, which is not standard library"
        if top in INPUT_AND_OUTPUT:
            yield f"{source.at(found.line)}: protocol imports {found.target}, which does input or output"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("open", "print", "input"):
            yield f"{source.at(node.lineno)}: protocol calls {ast.unparse(node.func)}()"


def sides_are_apart(source: Source) -> Iterator[str]:
    """The daemon and the client meet on the wire only."""
    for here, there in (("slotd.daemon", "slotd.client"), ("slotd.client", "slotd.daemon")):
        for found in source.imports:
            if _inside(source.module, here) and found.reaches(there):
                yield f"{source.at(found.line)}: {here} imports {there}"


def libraries_are_confined(source: Source) -> Iterator[str]:
    """click, rich, prompt_toolkit and cupy stay in the modules that are about them (tests may use all)."""
    if not _inside(source.module, "slotd"):
        return
    for found in source.imports:
        homes = CONFINED.get(found.target.partition(".")[0], ())
        if homes and not any(_inside(source.module, home) for home in homes):
            yield f"{source.at(found.line)}: imports {found.target}, allowed only in {', '.join(homes)}"


def no_shadowing_names(source: Source) -> Iterator[str]:
    """No module or folder is named like one of the standard library or of a dependency."""
    for part in source.module.split(".")[2:]:
        if part in sys.stdlib_module_names or part in DEPENDENCIES:
            yield f"{source.path}: {part} is the name of another module"


def daemon_layers_hold(source: Source) -> Iterator[str]:
    """Inside the daemon nothing imports a layer above its own."""
    level = {unit: depth for depth, units in enumerate(LAYERS) for unit in units}
    here = _unit(source.module)
    if not here:
        return
    if here not in level:
        yield f"{source.path}: daemon/{here} has no layer yet, give it one in LAYERS"
        return
    for found in source.imports:
        there = _unit(f"{found.target}.{found.name}")
        if there and there in level and level[there] < level[here]:
            yield f"{source.at(found.line)}: {here} imports {there}, which is a layer above it"


def front_knows_no_engine(source: Source) -> Iterator[str]:
    """Front and engine speak through messages, so that either can be hosted elsewhere."""
    for found in source.imports:
        if _unit(source.module) in FRONT and (there := _unit(f"{found.target}.{found.name}")) in ENGINE:
            yield f"{source.at(found.line)}: the front imports {there}, a part of the engine"


def guesses_are_pure(source: Source) -> Iterator[str]:
    """slotd.daemon.spec is functions over arrays: NumPy, what needs no input or output, and itself."""
    if not _inside(source.module, "slotd.daemon.spec"):
        return
    for found in source.imports:
        top = found.target.partition(".")[0]
        known = top == "numpy" or (top in sys.stdlib_module_names and top not in INPUT_AND_OUTPUT)
        if not known and not found.reaches("slotd.daemon.spec"):
            yield f"{source.at(found.line)}: spec imports {found.target}"


RULES_AND_OFFENDERS: list[tuple[Rule, Source]] = [
    (no_relative_imports, sample("slotd.client.bus", "from . import process")),
    (no_relative_imports, sample("slotd.client.bus", "from .process import spawn")),
    (no_folder_names, sample("slotd.client.bus", "import daemon")),
    (no_folder_names, sample("tests.unit.test_x", "from protocol.errors import CODES")),
    (no_folder_names, sample("tests.unit.test_x", "import importlib as i\ni.import_module('daemon.rows')")),
    (protocol_is_pure, sample("slotd.protocol.wire", "import numpy as np")),
    (protocol_is_pure, sample("slotd.protocol.wire", "from slotd.client import process")),
    (protocol_is_pure, sample("slotd.protocol.wire", "import os.path")),
    (protocol_is_pure, sample("slotd.protocol.wire", "def read(path):\n    return open(path)")),
    (sides_are_apart, sample("slotd.daemon.loop", "from slotd.client import process")),
    (sides_are_apart, sample("slotd.client.bus", "def f():\n    from slotd.daemon.rows import Row")),
    (sides_are_apart, sample("slotd.client.bus", "import importlib as i\ni.import_module('slotd.daemon')")),
    (sides_are_apart, sample("slotd.client.bus", "from slotd import daemon")),
    (libraries_are_confined, sample("slotd.client.batch", "import click")),
    (libraries_are_confined, sample("slotd.client.batch", "from rich.table import Table")),
    (libraries_are_confined, sample("slotd.daemon.log", "from prompt_toolkit import prompt")),
    (libraries_are_confined, sample("slotd.daemon.models.llama", "import cupy")),
    (libraries_are_confined, sample("slotd.daemon.cuda_backend", "import cupy")),
    (libraries_are_confined, sample("slotd.daemon.memory.pool", "from cupy_backends.cuda.libs import nvrtc")),
    (no_shadowing_names, sample("slotd.client.queue", "")),
    (no_shadowing_names, sample("slotd.daemon.gguf.reader", "")),
    (daemon_layers_hold, sample("slotd.daemon.ops.numpy_ops", "from slotd.daemon.models import llama")),
    (daemon_layers_hold, sample("slotd.daemon.engine", "import slotd.daemon.scheduler")),
    (daemon_layers_hold, sample("slotd.daemon.memory.ledger", "from slotd.daemon.ops import interface")),
    (daemon_layers_hold, sample("slotd.daemon.rows", "from slotd.daemon import engine")),
    (daemon_layers_hold, sample("slotd.daemon.brandnew", "")),
    (guesses_are_pure, sample("slotd.daemon.spec.tree", "from slotd.daemon.rows import Rows")),
    (guesses_are_pure, sample("slotd.daemon.spec.adaptation", "import time")),
    (front_knows_no_engine, sample("slotd.daemon.front", "from slotd.daemon.engine import Engine")),
    (front_knows_no_engine, sample("slotd.daemon.loop", "from slotd.daemon.kv import pages")),
]
RULES = list(dict.fromkeys(rule for rule, _ in RULES_AND_OFFENDERS))

#: Good files that a rule must not complain about.
INNOCENT = [
    sample("slotd.protocol.wire", "import json\nfrom slotd.protocol.errors import CODES"),
    sample("slotd.client.cli", "import click\nfrom slotd.protocol import errors"),
    sample("slotd.daemon.ops.kernels.loader", "import cupy"),
    sample("slotd.daemon.ops.cuda_attention", "import cupy"),
    sample("slotd.daemon.engine", "from slotd.daemon.models import llama\nfrom slotd.daemon.rows import Row"),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_tree_keeps_the_rule(rule: Rule) -> None:
    violations = _violations(rule, product_sources() + sources_of_tests())
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize(("rule", "offender"), RULES_AND_OFFENDERS)
def test_rule_sees_an_offender(rule: Rule, offender: Source) -> None:
    assert _violations(rule, [offender])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_lets_good_files_pass(rule: Rule) -> None:
    assert _violations(rule, INNOCENT) == []


@pytest.mark.parametrize(
    ("loaded", "left_out"),
    [
        ("serve_process", ("numpy",)),  # it starts the engine's process, then loads the rest
        ("assembly, process_host", tuple(f"slotd.daemon.{unit}" for unit in ENGINE)),
    ],
)
def test_a_front_beside_an_engine_process_loads_no_engine(loaded: str, left_out: tuple[str, ...]) -> None:
    """By way of nobody: it would cost the start time twice."""
    code = f"import sys; from slotd.daemon import {loaded}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(left_out).isdisjoint(done.stdout.split())


def test_all_three_packages_are_read() -> None:
    found = {source.module for source in product_sources()}
    assert set(PACKAGES) <= found
    assert len(found) > len(PACKAGES)


def test_imports_make_no_circle() -> None:
    assert _circle(product_sources()) == []


def test_a_circle_is_seen() -> None:
    there = sample("slotd.client.bus", "from slotd.client import process")
    back = sample("slotd.client.process", "from slotd.client.bus import Bus")
    assert _circle([there, back])


def _violations(rule: Rule, sources: Iterable[Source]) -> list[str]:
    return [violation for source in sources for violation in rule(source)]


def _circle(sources: Iterable[Source]) -> list[str]:
    """One circle of modules that import each other, or nothing. Imports for types only do not count."""
    sources = list(sources)
    modules = {source.module for source in sources}
    graph: dict[str, set[str]] = {}
    for source in sources:
        loaded = [found for found in source.imports if found.line not in source.typing_lines]
        reached = {_module_of(found, modules) for found in loaded}
        graph[source.module] = reached & modules - {source.module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _module_of(found: Import, modules: set[str]) -> str:
    submodule = f"{found.target}.{found.name}"
    return submodule if submodule in modules else found.target


def _inside(module: str, package: str) -> bool:
    return fnmatchcase(module, package) or fnmatchcase(module, package + ".*")


def _unit(module: str) -> str:
    """The module or folder directly under daemon/ that `module` belongs to, "" for anything else."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["slotd", "daemon"] and len(parts) > 2 else ""
