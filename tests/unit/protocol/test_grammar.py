"""The table of verbs agrees with the messages and with itself."""

from __future__ import annotations

import dataclasses

import pytest

from slotd.protocol import grammar, messages
from slotd.protocol.grammar import FIELDS, SAMPLER_ORDER, VERBS, Field, Verb, ends_stream, find_verb, verb_of

COMMANDS = {
    value
    for value in vars(messages).values()
    if isinstance(value, type) and issubclass(value, messages.Command) and value is not messages.Command
}


def by_name(name: str) -> Verb:
    return next(verb for verb in VERBS if verb.name == name)


def test_every_command_has_a_verb() -> None:
    assert {verb.message for verb in VERBS} == COMMANDS
    assert len({verb.name for verb in VERBS}) == len(VERBS)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_words_and_fields_are_attributes_of_the_message(verb: Verb) -> None:
    own = {field.name for field in dataclasses.fields(verb.message)}
    sampling = {field.name for field in dataclasses.fields(messages.Sampling)}
    assert {word.name for word in verb.words} <= own
    for name in verb.fields:
        home = sampling if FIELDS[name].sampling else own
        assert name == "samp" or name in home


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb.supported], ids=lambda verb: verb.name)
def test_every_attribute_of_a_message_can_be_said(verb: Verb) -> None:
    said = {word.name for word in verb.words} | set(verb.fields)
    own = {field.name for field in dataclasses.fields(verb.message)}
    assert own - said <= {"sampling"}
    if "sampling" in own:
        assert {field.name for field in dataclasses.fields(messages.Sampling)} <= said


def test_every_field_is_taken_by_a_verb() -> None:
    assert {name for verb in VERBS for name in verb.fields} == set(FIELDS)
    assert all("id" in verb.fields for verb in VERBS)


def test_spellings_are_unique_and_start_words_are_known() -> None:
    spellings = [spelling for verb in VERBS for spelling in verb.spellings]
    assert len(set(spellings)) == len(spellings)
    assert {spelling.split()[0] for spelling in spellings} == grammar.FIRST_WORDS


@pytest.mark.parametrize(
    ("words", "name", "used"),
    [
        (["park"], "park", 1),
        (["park", "target"], "park", 1),
        (["free", "drafter"], "free drafter", 2),
        (["drafter", "free", "id=r1"], "free drafter", 2),
        (["exit"], "quit", 1),
        (["compress", "x"], "compress", 1),
    ],
)
def test_find_verb(words: list[str], name: str, used: int) -> None:
    found = find_verb(words)
    assert found is not None
    assert (found[0].name, found[1]) == (name, used)


@pytest.mark.parametrize(
    "words", [[], [""], ["parkour"], ["Park"], ["free"], ["drafter"], ["PROMPT"], ["snapshot"]]
)
def test_spelling_is_exact(words: list[str]) -> None:
    assert find_verb(words) is None


@pytest.mark.parametrize(
    ("verb", "expected"),
    [
        ("PROMPT", True), ("RESTORE", True), ("park", True), ("unpark", True), ("free drafter", True),
        ("compress", True), ("RESTORE_CHAIN", True), ("", True), ("garbage", True),
        ("SNAPSHOT", False), ("SNAPSHOT_THIN", False), ("FREE_SNAPSHOT", False), ("LIST_SLOTS", False),
        ("generate", False), ("HELLO", False), ("CANCEL", False), ("STATUS", False), ("PROPS", False),
        ("quit", False),
    ],
)  # fmt: skip
def test_which_verbs_end_with_minus_one(verb: str, expected: bool) -> None:
    assert ends_stream(verb) is expected


def test_only_some_verbs_are_answered_at_once() -> None:
    assert {verb.name for verb in VERBS if verb.at_once} == {"HELLO", "CANCEL", "STATUS", "PROPS", "quit"}


def test_verb_of_a_message() -> None:
    assert verb_of(messages.Restore()) is by_name("RESTORE")
    assert verb_of(messages.Prompt()) is grammar.PROMPT
    assert verb_of(messages.Unsupported(name="compress")) is by_name("compress")
    assert verb_of(messages.Unsupported(name="park")) is None
    assert verb_of(messages.Command()) is None


@pytest.mark.parametrize(
    ("field", "limit"),
    [
        (FIELDS["top_p"], "(0..1]"),
        (FIELDS["temperature"], "0..100"),
        (FIELDS["frequency_penalty"], "-100..100"),
        (FIELDS["seed"], "0..18446744073709551615"),
        (FIELDS["fit"], "0|1"),
        (grammar.WHAT, "all|draft|target"),
    ],
)
def test_limit(field: Field, limit: str) -> None:
    assert field.limit == limit


@pytest.mark.parametrize(
    ("name", "usage"),
    [
        ("PROMPT", "PATH N_GEN"),
        ("RESTORE", "RESTORE SLOT PATH N_GEN"),
        ("park", "park [all|draft|target]"),
        ("free drafter", "free drafter"),
        ("HELLO", "HELLO"),
    ],
)
def test_usage(name: str, usage: str) -> None:
    assert by_name(name).usage == usage


def test_the_sampler_tail_is_made_of_fields() -> None:
    assert all(FIELDS[name].sampling for name in SAMPLER_ORDER)
    assert FIELDS["samp"].most == len(SAMPLER_ORDER)
