"""README.md and PROTOCOL.md name everything that there is, and nothing that there is not."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from functools import cache

import click
import pytest

from slotd.client import flags
from slotd.daemon import cli as daemon_cli
from slotd.daemon.weights.kv_formats import KV_FORMATS, KV_NAMES
from slotd.protocol.errors import CODES
from slotd.protocol.event_grammar import ACCOUNT, EVENTS, JSON_KINDS
from slotd.protocol.grammar import FIELDS, VERBS
from tests.architecture.sources import ROOT, product_sources

VARIABLE = re.compile(r"\bSLOTD_[A-Z0-9_]+\b")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


@pytest.fixture(scope="module")
def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def specification() -> str:
    return (ROOT / "protocol" / "PROTOCOL.md").read_text(encoding="utf-8")


@cache
def commands() -> dict[str, set[str]]:
    """Command of `slotd` -> every spelling of its flags."""
    found = {name: _flags(command) for name, command in _group("slotd.client.cli").commands.items()}
    # `slotd daemon` and `slotd inspect` hand their arguments to the daemon's own command line.
    for name, command in _group("slotd.daemon.cli").commands.items():
        found[name] = found[name] | _flags(command)
    return found


def _group(module: str) -> click.Group:
    """The outermost click group that a module defines."""
    names = vars(importlib.import_module(module)).values()
    groups = [value for value in names if isinstance(value, click.Group)]
    assert len(groups) == 1, f"{module} has {len(groups)} click groups"
    return groups[0]


def _flags(command: click.Command) -> set[str]:
    context = click.Context(command, help_option_names=["-h", "--help"])
    options = [param for param in command.get_params(context) if isinstance(param, click.Option)]
    return {spelling for option in options for spelling in (*option.opts, *option.secondary_opts)}


def variables() -> set[str]:
    """Every SLOTD_ variable that a string of the product names."""
    return {
        name
        for source in product_sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for name in VARIABLE.findall(node.value)
    }


def shell_lines(readme: str) -> Iterator[list[str]]:
    """The commands in README's sh blocks, as words; a pipe or redirection ends a command."""
    for language, block in FENCE.findall(readme):
        if language == "sh":
            for line in block.replace("\\\n", " ").splitlines():
                for part in re.split(r"\s[|><]+\s|&&|;", line.partition(" #")[0]):
                    words = shlex.split(part)
                    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                        words = words[1:]
                    if words:
                        yield words


def names_it(text: str, name: str) -> bool:
    """Whether `text` has `name` as a word of its own: --top-k is no evidence for --top."""
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text) is not None


# --------------------------------------------------------------------------------------------------
# README.md


def test_every_command_is_named(readme: str) -> None:
    assert [name for name in commands() if not names_it(readme, f"slotd {name}")] == []


def test_every_flag_is_named(readme: str) -> None:
    flags = set().union(*commands().values())
    missing = sorted(flag for flag in flags if flag not in ("-h", "--help") and not names_it(readme, flag))
    assert missing == []


def test_every_kv_type_is_in_the_help_and_in_readme(readme: str) -> None:
    for text in (daemon_cli.KV_TYPES, flags.KV_TYPES):
        assert set(text.replace("or ", "").split()) == set(KV_NAMES)
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| ([\d,]+|-) \|", readme, re.MULTILINE)
    sizes = {name: kind.row_bytes(64) for name, kind in KV_FORMATS.items()}
    assert {name: float(bits) for name, bits, _ in rows} == {name: size / 8 for name, size in sizes.items()}
    smollm2 = {name: f"{30 * 3 * 2 * size:,}" for name, size in sizes.items()}
    smollm2["tq3_0"] = "-"  # its heads are too narrow
    assert {name: text for name, _, text in rows} == smollm2


def test_every_flag_in_it_exists(readme: str) -> None:
    known = set().union(*commands().values()) | _flags(_group("slotd.client.cli"))
    assert sorted(set(FLAG.findall(readme)) - known) == []


def test_every_variable_is_named(readme: str) -> None:
    found = variables()
    assert {"SLOTD_HOME", "SLOTD_MODEL"} <= found
    assert sorted(name for name in found if not names_it(readme, name)) == []


def test_every_variable_in_it_exists(readme: str) -> None:
    conftest = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    assert sorted(set(VARIABLE.findall(readme)) - variables() - set(VARIABLE.findall(conftest))) == []


def test_every_chat_command_is_named(readme: str) -> None:
    from slotd.client.slash import COMMANDS

    assert [name for name in COMMANDS if not names_it(readme, name)] == []


def test_its_commands_exist(readme: str) -> None:
    lines = [words for words in shell_lines(readme) if words[0] == "slotd" and len(words) > 1]
    assert lines
    for words in lines:
        if not words[1].startswith("-"):
            assert words[1] in commands(), " ".join(words)
            used = {word.partition("=")[0] for word in words[2:] if re.match(r"--?[a-zA-Z]", word)}
            assert used <= commands()[words[1]], " ".join(words)


def test_its_make_targets_exist(readme: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)`", readme))
    named |= {words[1] for words in shell_lines(readme) if words[0] == "make" and len(words) > 1}
    assert {"run", "test"} <= named
    assert named <= targets


def test_its_links_point_to_files(readme: str) -> None:
    links = [link for link in LINK.findall(readme) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_its_python_uses_what_the_client_exports(readme: str) -> None:
    blocks = [ast.parse(block) for language, block in FENCE.findall(readme) if language == "python"]
    assert blocks
    for block in blocks:
        for node in ast.walk(block):
            if isinstance(node, ast.ImportFrom):
                exported = importlib.import_module(node.module or "").__all__
                assert {alias.name for alias in node.names} <= set(exported)


def test_its_extras_exist(readme: str) -> None:
    setup = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    named = {extra for group in re.findall(r"(?:slotd|\.)\[([\w,]+)\]", readme) for extra in group.split(",")}
    assert {"cuda12", "cuda13", "rocm"} <= named
    assert [extra for extra in named if not re.search(rf"^{extra} =$", setup, re.MULTILINE)] == []


# --------------------------------------------------------------------------------------------------
# PROTOCOL.md


def test_every_verb_is_specified(specification: str) -> None:
    spellings = [spelling for verb in VERBS for spelling in verb.spellings]
    assert len(spellings) > 10
    assert [spelling for spelling in spellings if not names_it(specification, spelling)] == []


def test_every_field_is_specified(specification: str) -> None:
    assert [name for name in FIELDS if not names_it(specification, name)] == []


def test_every_event_is_specified(specification: str) -> None:
    leads = {form.lead for form in EVENTS} | {f"[{kind}]" for kind in JSON_KINDS}
    fields = {f"{field.name}=" for form in EVENTS for field in form.fields}
    assert sorted(part for part in leads | fields if part not in specification) == []
    assert [name for name in ACCOUNT if not names_it(specification, name)] == []


def test_every_error_code_is_specified(specification: str) -> None:
    assert [code for code in CODES if not names_it(specification, code)] == []


# --------------------------------------------------------------------------------------------------
# The tests themselves


@pytest.mark.parametrize(
    ("text", "name", "named"),
    [
        ("use `--top-k` here", "--top-k", True),
        ("use `--top-k` here", "--top", False),
        ("use `--top-k=3` here", "--top-k", True),
        ("use `-n 3`", "-n", True),
        ("use `-np 3`", "-n", False),
        ("`SLOTD_MODEL_X`", "SLOTD_MODEL", False),
        ("`SNAPSHOT_THIN 1`", "SNAPSHOT", False),
    ],
)
def test_a_name_is_a_whole_word(text: str, name: str, named: bool) -> None:
    assert names_it(text, name) is named


def test_commands_are_found_with_their_flags() -> None:
    assert {"chat", "batch", "generate", "bench", "doctor", "fetch", "inspect", "daemon"} <= set(commands())
    assert {"--max-ctx", "--stream-fd", "-ctk"} <= commands()["daemon"]
