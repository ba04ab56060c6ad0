"""PROTOCOL.md says what the tables say: its rows are compared with rows made from them."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

import slotd.protocol.grammar
from slotd.protocol.command_lines import parse_command
from slotd.protocol.errors import CODES, RequestError
from slotd.protocol.event_grammar import ACCOUNT, EVENTS, JSON_KINDS
from slotd.protocol.event_lines import parse_event
from slotd.protocol.grammar import FIELDS, SAMPLER_ORDER, SLOT, SNAP_AT, VERBS, Field, Verb
from slotd.protocol.linebuffer import DEFAULT_MAX_LINE
from slotd.protocol.messages import Prompt, Sampling, Unknown

TEXT = Path(slotd.protocol.grammar.__file__).with_name("PROTOCOL.md").read_text(encoding="utf-8")
LINES = TEXT.splitlines()
UNSUPPORTED = [verb.name for verb in VERBS if not verb.supported]
TRANSCRIPTS = re.findall(r"^```transcript\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)

KINDS = {
    "int": "integer",
    "real": "number",
    "flag": "flag",
    "choice": "word",
    "hash": "hash",
    "request_id": "name",
    "ids": "token ids",
    "biases": "ID:BIAS pairs",
    "snap": "AT:SLOT",
    "sampler": "numbers",
}


def table(title: str) -> list[str]:
    """The rows of the first table below a heading, without its head."""
    at = LINES.index(title)
    rows = []
    for line in LINES[at + 1 :]:
        if line.startswith("|"):
            rows.append(line)
        elif rows:
            break
    return rows[2:]


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def verb_row(verb: Verb) -> str:
    lines = [verb.usage] + [f"`{spelling}`" for spelling in verb.spellings[1:]]
    usage = " or ".join([f"`{lines[0]}`", *lines[1:]])
    extra = [f"`{name}`" for name in verb.fields]
    fields = "prompt fields" if len(verb.fields) > 12 and "ids" in verb.fields else " ".join(extra)
    if verb.name == "generate":
        fields = "`id` `samp`, sampling fields"
    when = "at once" if verb.at_once else "in turn"
    meaning = verb.meaning if verb.supported else f"{verb.meaning}; answered with `unsupported`"
    return row(usage, fields, "yes" if verb.ends_stream else "no", when, meaning)


def kind_of(field: Field) -> str:
    if field.kind == "tokens":
        return f"token ids, 1 to {field.most}"
    return KINDS[field.kind] + (f", up to {field.most}" if field.most else "")


def limit_of(field: Field) -> str:
    match field.kind:
        case "request_id":
            return "1-64 of `A-Za-z0-9._:-`"
        case "hash":
            return "32 of `0-9a-f`"
        case "snap":
            return f"AT `{SNAP_AT.limit}`, SLOT `{SLOT.limit}`"
        case "sampler":
            return "each as its own field"
        case _:
            return f"`{field.limit}`"


def default_of(field: Field) -> str:
    value = getattr(Sampling() if field.sampling else Prompt(), field.name, None)
    return "-" if value in (None, ()) else str(int(value) if value == int(value) else value)


def test_verbs_table() -> None:
    assert table("## Verbs") == [verb_row(verb) for verb in VERBS]


def test_fields_table() -> None:
    rows = [row(f"`{f.name}`", kind_of(f), limit_of(f), default_of(f), f.meaning) for f in FIELDS.values()]
    assert table("## Fields") == rows


def test_codes_table() -> None:
    assert table("### Codes") == [row(f"`{code}`", meaning) for code, meaning in CODES.items()]


def test_the_order_of_the_sampler_tail() -> None:
    assert f"`samp={','.join(SAMPLER_ORDER)}`" in TEXT


def test_every_event_form_has_an_example_line_that_parses() -> None:
    rows = table("## Events")
    events = [parse_event(re.split(r" *` *", line)[1].replace("\\|", "|")) for line in rows]
    assert not [event for event in events if isinstance(event, Unknown)]
    assert {type(event) for event in events} == {form.message for form in EVENTS} | {
        type(parse_event("[hello] {}"))
    }
    assert {getattr(event, "kind", "") for event in events} == {"", *JSON_KINDS}


def test_the_time_account_is_listed_in_order() -> None:
    assert ", ".join(f"`{name}`" for name in ACCOUNT) in " ".join(TEXT.split())


def test_the_default_line_limit() -> None:
    assert f"{DEFAULT_MAX_LINE // 2**20} MiB" in TEXT


# --------------------------------------------------------------------------------------------------
# Examples


def lines_of(kind: str) -> list[str]:
    return [
        line.removeprefix(kind)
        for block in TRANSCRIPTS
        for line in block.splitlines()
        if line.startswith(kind)
    ]


def test_there_are_examples() -> None:
    assert len(TRANSCRIPTS) >= 10


@pytest.mark.parametrize("block", TRANSCRIPTS, ids=lambda block: block.splitlines()[0])
def test_every_line_of_an_example_has_a_known_form(block: str) -> None:
    for number, line in enumerate(block.splitlines()):
        assert re.match(r"(D|C|S|S\*|T): \S", line), line
        assert number == 0 or not line.startswith("D: "), "flags stand first"


def answered_commands() -> list[tuple[str, str]]:
    """Every command of the examples with the line behind it."""
    pairs = [pair for block in TRANSCRIPTS for pair in pairwise([*block.splitlines(), ""])]
    return [(line.removeprefix("C: "), behind) for line, behind in pairs if line.startswith("C: ")]


def test_a_refused_command_of_an_example_is_answered_as_it_says() -> None:
    """What the parser refuses stands with exactly the code and fields that the parser gives."""
    refused = 0
    for line, answer in answered_commands():
        if error := refusal_of(line):
            refused += 1
            said = f"{error.code} " + " ".join(f"{key}={value}" for key, value in error.fields.items())
            assert said in answer
    assert refused >= 3


def refusal_of(line: str) -> RequestError | None:
    try:
        parse_command(line)
    except RequestError as error:
        return error
    return None


def test_an_unsupported_verb_of_an_example_is_refused_by_name() -> None:
    answers = [answer for line, answer in answered_commands() if line.split()[0] in UNSUPPORTED]
    assert answers
    assert all("unsupported verb=" in answer for answer in answers)


def test_every_verb_has_an_example() -> None:
    sent = lines_of("C: ")
    for verb in VERBS:
        if verb.spellings and verb.name not in ("free drafter", "PROPS"):
            assert any(line.split()[0] == verb.spellings[0] for line in sent), verb.name


def test_expected_lines_are_lines_of_the_grammar() -> None:
    for line in [*lines_of("S: "), *lines_of("S*: ")]:
        if "<...>" in line or line.startswith("[hello]"):
            continue
        event = parse_event(re.sub(r"<n>", "7", line))
        assert not isinstance(event, Unknown), line


def test_token_ids_of_examples_fit_a_vocabulary_of_320() -> None:
    lists = [found for line in lines_of("C: ") for found in re.findall(r"ids=([0-9]+(?:,[0-9]+)*)", line)]
    assert lists
    assert max(int(token) for found in lists for token in found.split(",")) < 320
