"""A screen that remembers what was shown; implements `slotd.client.chat.Ui`."""

from __future__ import annotations


class FakeUi:
    """`answers` are whole answers, `thought` all thoughts in one, `tables` lists of rows."""

    def __init__(self, *, interactive: bool) -> None:
        self.interactive = interactive
        self.answers: list[str] = []
        self.notices: list[str] = []
        self.errors: list[str] = []
        self.tables: list[list[tuple[str, str]]] = []
        self.progressed: list[tuple[int, int]] = []
        self._text = ""
        self.thought = ""

    def progress(self, at: int, of: int) -> None:
        self.progressed.append((at, of))

    def reasoning(self, text: str) -> None:
        self.thought += text

    def answer(self, text: str) -> None:
        self._text += text

    def end_answer(self) -> None:
        if self._text:
            self.answers.append(self._text)
            self._text = ""

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def error(self, text: str) -> None:
        self.errors.append(text)

    def table(self, rows: list[tuple[str, str]]) -> None:
        self.tables.append(rows)
