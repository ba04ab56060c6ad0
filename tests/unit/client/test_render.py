"""What reaches stdout and stderr."""

from __future__ import annotations

import io

import pytest

from slotd.client.batch import Counts
from slotd.client.render import BatchProgress, Screen, print_facts


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_answers_end_with_one_line_end() -> None:
    out = io.StringIO()
    screen = Screen(interactive=False, out=out)
    for text in ("a", "", "b", "\n"):
        screen.answer(text)
    screen.end_answer()
    screen.answer("c")
    screen.end_answer()
    screen.end_answer()
    assert out.getvalue() == "ab\nc\n"


def test_a_model_cannot_drive_the_terminal() -> None:
    out = Terminal()
    Screen(interactive=True, out=out).answer("a\x1b]0;x\x07\x9b\tb\n")
    assert out.getvalue() == "a]0;x\tb\n"


def test_a_pipe_gets_the_text_as_it_is() -> None:
    out = io.StringIO()
    Screen(interactive=False, out=out).answer("a\x1b[1m")
    assert out.getvalue() == "a\x1b[1m"


def test_notices_and_errors_go_to_stderr_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(interactive=True)
    screen.notice("n" * 200)
    screen.error("[bold]not markup " + "e" * 200)
    screen.table([("a", "1"), ("long", "x" * 200)])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "n" * 200,
        "slotd: [bold]not markup " + "e" * 200,
        "a     1",
        "long  " + "x" * 200,
    ]


def test_facts_go_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    print_facts([("a", "x" * 300), ("", "y")])
    assert capsys.readouterr().out == f"a  {'x' * 300}\n   y\n"


def test_progress_shows_nothing_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with BatchProgress(100) as progress:
        progress.update(Counts(done=1))
    Screen(interactive=True).progress(1, 2)
    assert capsys.readouterr() == ("", "")


def test_a_thought_goes_to_stderr_and_only_where_it_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    for shown in (True, False):
        screen = Screen(interactive=False, show_reasoning=shown)
        for piece in ("[b]Hm", "", ", so."):
            screen.reasoning(piece)
        screen.answer("Yes.")
        screen.end_answer()
        captured = capsys.readouterr()
        assert captured.out == "Yes.\n"
        assert captured.err == ("[b]Hm, so.\n\n" if shown else "")


def test_a_thought_without_an_answer_ends_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(interactive=False, show_reasoning=True)
    screen.reasoning("Hm")
    screen.error("no answer")
    assert capsys.readouterr() == ("", "Hm\n\nslotd: no answer\n")
