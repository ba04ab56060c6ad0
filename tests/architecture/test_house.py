"""Rules of the house that no linter knows: file sizes, names, leftovers, what a public tree must not say."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT

LONGEST = 450

#: File -> why it may be longer than LONGEST lines.
LONG_FILES: dict[str, str] = {
    "protocol/messages.py": "one dataclass for each command and each event: a table, read row by row",
}

VAGUE_NAMES = frozenset({"utils", "util", "helpers", "helper", "common", "manager", "misc"})

# Put together here, so that this file does not find itself.
LEFTOVERS = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3, "HA" + "CK")) + r")\b")

#: Absolute paths of somebody's machine. Places that exist on every Linux are no such paths.
PRIVATE_PATH = re.compile(r"(?<![\w./~$}])/(?:home|root|Users|work|workspace|mnt|opt|srv)/[\w.-]+")

#: Hosts that may be named in the tree. Package hosts are pip's business.
HOSTS = frozenset({"github.com", "www.apache.org", "keepachangelog.com", "semver.org", "mypy.readthedocs.io"})
URL = re.compile(r"https?://([\w.-]+)")

DOCUMENT = re.compile(r"(?<![\w/.*<-])((?:\.\./|[\w-]+/)*[\w-]+\.md)\b")

Check = Callable[[str, str], Iterator[str]]


def is_short(name: str, text: str) -> Iterator[str]:
    """A file beyond LONGEST lines is asking to be two."""
    lines = text.count("\n")
    if name.endswith(".py") and lines > LONGEST and name not in LONG_FILES:
        yield f"{name}: {lines} lines, over {LONGEST}; split it or give the reason in LONG_FILES"


def has_a_telling_name(name: str, text: str) -> Iterator[str]:
    """A module is named by what is in it."""
    parts = name.removesuffix(".py").split("/")
    for vague in VAGUE_NAMES.intersection(parts):
        yield f"{name}: {vague} says nothing about what is inside"


def has_no_leftovers(name: str, text: str) -> Iterator[str]:
    """Open work is in the tracker, not in the tree."""
    for number, line in enumerate(text.splitlines(), 1):
        if found := LEFTOVERS.search(line):
            yield f"{name}:{number}: {found[0]}"


def daemon_does_not_print(name: str, text: str) -> Iterator[str]:
    """The daemon's stdout belongs to the protocol: print() says file=sys.stderr."""
    if not name.startswith("daemon/") or not name.endswith(".py"):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            files = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "file"]
            if files != ["sys.stderr"]:
                yield f"{name}:{node.lineno}: print() to stdout in the daemon"


def names_no_private_place(name: str, text: str) -> Iterator[str]:
    """Nothing points at the machine or the network that it was written on."""
    for number, line in enumerate(text.splitlines(), 1):
        for path in PRIVATE_PATH.findall(line):
            yield f"{name}:{number}: {path} is a place on one machine"
        for host in URL.findall(line):
            if host not in HOSTS and name != "LICENSE":
                yield f"{name}:{number}: the host {host} is not in HOSTS"


def names_existing_documents(name: str, text: str) -> Iterator[str]:
    """A document that a comment sends the reader to is in this repository."""
    for number, line in enumerate(text.splitlines(), 1):
        for document in DOCUMENT.findall(line.replace("slotd/protocol/", "protocol/")):
            if not any((folder / document).exists() for folder in _folders(name)):
                yield f"{name}:{number}: {document} is not in the repository"


def _folders(name: str) -> list[Path]:
    """Where a document that the file `name` mentions may lie; PROTOCOL.md needs no folder."""
    return [(ROOT / name).parent, ROOT, ROOT / "protocol"]


CHECKS: list[tuple[Check, str, str]] = [
    (is_short, "daemon/engine.py", "x = 1\n" * (LONGEST + 1)),
    (has_a_telling_name, "client/utils.py", ""),
    (has_a_telling_name, "daemon/helpers/text.py", ""),
    (has_no_leftovers, "client/bus.py", "# TO" + "DO: later"),
    (has_no_leftovers, "README.md", "FIX" + "ME"),
    (daemon_does_not_print, "daemon/loop.py", "def f() -> None:\n    print('x')\n"),
    (daemon_does_not_print, "daemon/loop.py", "print('x', file=sys.stdout)\n"),
    (names_no_private_place, "client/bus.py", "MODEL = '/ho" + "me/me/model.gguf'"),
    (names_no_private_place, "client/fetch.py", "INDEX = 'https://" + "mirror.example/simple'"),
    (names_existing_documents, "client/bus.py", "# see notes/secret" + ".md"),
]
RULES = list(dict.fromkeys(check for check, _, _ in CHECKS))


@pytest.fixture(scope="module")
def tree() -> dict[str, str]:
    """Path -> text of every text file that git would take."""
    texts = {}
    for name in _files():
        try:
            texts[name] = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:  # model and id files of the tests
            continue
    return texts


def _files() -> list[str]:
    """Files of the repository; without git (an archive) those in the root and in the folders of source."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    folders = [ROOT / name for name in ("protocol", "daemon", "client", "tests", ".ci")]
    found = [*ROOT.iterdir(), *(path for folder in folders for path in folder.rglob("*"))]
    return [
        path.relative_to(ROOT).as_posix()
        for path in found
        if path.is_file() and "__pycache__" not in path.parts
    ]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_tree_keeps_the_rule(rule: Check, tree: dict[str, str]) -> None:
    violations = [found for name, text in tree.items() for found in rule(name, text)]
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize(("rule", "name", "text"), CHECKS, ids=lambda value: getattr(value, "__name__", ""))
def test_rule_sees_an_offender(rule: Check, name: str, text: str) -> None:
    assert list(rule(name, text))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_lets_a_good_file_pass(rule: Check) -> None:
    assert list(rule("client/bus.py", "# PROTOCOL" + ".md has the grammar\nprint('answer')\n")) == []


def test_the_tree_is_read(tree: dict[str, str]) -> None:
    assert {"setup.cfg", "protocol/errors.py", "daemon/rows.py", "README.md"} <= set(tree)


def test_long_files_are_long_and_have_a_reason(tree: dict[str, str]) -> None:
    unneeded = [
        name for name, reason in LONG_FILES.items() if not reason or tree.get(name, "").count("\n") <= LONGEST
    ]
    assert unneeded == []
