"""The source tree as the architecture tests read it: parsed files, never imported ones."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Installed package -> folder in the repository.
PACKAGES = {f"slotd.{name}": ROOT / name for name in ("protocol", "daemon", "client")}


@dataclass(frozen=True)
class Import:
    """One imported name: `target` is the dotted module, `name` what ``from target import name`` takes."""

    line: int
    target: str
    name: str = ""
    relative: bool = False

    def reaches(self, module: str) -> bool:
        """Whether this import loads `module` or something inside it."""
        full = f"{self.target}.{self.name}" if self.name else self.target
        return any(dotted == module or dotted.startswith(module + ".") for dotted in (self.target, full))


@dataclass(frozen=True)
class Source:
    """One Python file: its dotted name when installed, where it lies, its text."""

    module: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @cached_property
    def imports(self) -> list[Import]:
        """Every import of the file, also those inside functions and under TYPE_CHECKING."""
        return sorted(_imports(self.tree), key=lambda found: found.line)

    @cached_property
    def typing_lines(self) -> set[int]:
        """Lines under ``if TYPE_CHECKING:``: what is imported there is not loaded."""
        return {
            line
            for node in ast.walk(self.tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for line in range(node.lineno, (node.body[-1].end_lineno or node.lineno) + 1)
        }

    def at(self, line: int) -> str:
        """Where a violation stands, for a message."""
        return f"{self.path}:{line}"


def _imports(tree: ast.Module) -> Iterator[Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield Import(node.lineno, node.module or "", alias.name, relative=node.level > 0)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield Import(node.lineno, argument.value)


def _called(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


@cache
def product_sources() -> tuple[Source, ...]:
    """All modules of the three packages, parsed once for all rules."""
    return tuple(source for package, folder in PACKAGES.items() for source in _sources_under(folder, package))


@cache
def sources_of_tests() -> tuple[Source, ...]:
    """All Python files of the tests."""
    return tuple(_sources_under(ROOT / "tests", "tests"))


def _sources_under(folder: Path, package: str) -> Iterator[Source]:
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        yield Source(".".join((package, *parts)), path, path.read_text(encoding="utf-8"))


def sample(module: str, text: str) -> Source:
    """A made-up file, to show that a rule fails when it is broken."""
    return Source(module, Path(f"sample/{module.replace('.', '/')}.py"), text)
