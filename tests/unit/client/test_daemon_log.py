"""What of the daemon's stderr a person sees."""

from __future__ import annotations

import pytest

from slotd.client.daemon_log import show_warning


def test_warnings_pass_and_the_rest_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (
        "slotd[12] WARNING slotd.daemon.serve: --max-ctx 9 is beyond 8",
        "slotd[12] INFO slotd.daemon.serve: loaded",
        "slotd: not a model",
        "",
    ):
        show_warning(line)
    assert capsys.readouterr() == ("", "slotd: --max-ctx 9 is beyond 8\n")
