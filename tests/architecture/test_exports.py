"""``__all__`` is exact: what a package offers is what it declares, and all of it exists."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator

import pytest

from tests.architecture.sources import PACKAGES, Source, product_sources, sample

DECLARING = [source for source in product_sources() if source.path.name == "__init__.py"]


def undeclared(source: Source) -> set[str]:
    """Public names of a package that ``__all__`` does not list."""
    return set(_public_names(source.tree.body)) - set(declared(source))


def declared(source: Source) -> list[str]:
    """The strings of ``__all__``, [] when there is none."""
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return []


def _public_names(body: list[ast.stmt]) -> Iterator[str]:
    """Names bound by statements of a module: definitions, and what it imports from slotd."""
    for node in body:
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "slotd":
            names = [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        elif isinstance(node, ast.If):  # if TYPE_CHECKING: names that are loaded lazily
            names = [*_public_names(node.body), *_public_names(node.orelse)]
        yield from (name for name in names if not name.startswith("_"))


@pytest.mark.parametrize("source", DECLARING, ids=lambda source: source.module)
def test_every_public_name_is_declared(source: Source) -> None:
    assert undeclared(source) == set()


@pytest.mark.parametrize("source", DECLARING, ids=lambda source: source.module)
def test_every_declared_name_exists(source: Source) -> None:
    package = importlib.import_module(source.module)
    assert [name for name in declared(source) if not hasattr(package, name)] == []


@pytest.mark.parametrize("source", DECLARING, ids=lambda source: source.module)
def test_names_are_declared_once(source: Source) -> None:
    names = declared(source)
    assert len(names) == len(set(names))


def test_the_three_packages_are_among_them() -> None:
    assert set(PACKAGES) <= {source.module for source in DECLARING}


def test_client_offers_both_clients() -> None:
    client = next(source for source in DECLARING if source.module == "slotd.client")
    assert {"Client", "AsyncClient"} <= set(declared(client))


@pytest.mark.parametrize(
    "text",
    [
        "from slotd.client.bus import Bus\n__all__ = []",
        "def spawn() -> None: ...",
        "class Client: ...\n__all__ = ['Other']",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from slotd.client.bus import Bus",
        "LIMIT = 3",
    ],
)
def test_an_undeclared_name_is_seen(text: str) -> None:
    assert undeclared(sample("slotd.client", text))
