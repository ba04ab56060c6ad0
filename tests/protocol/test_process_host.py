"""Thread or process: the same conformance. A choice of the tests of both versions, in a process.

The transcripts of PROTOCOL.md run with both in `test_transcripts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.daemon_process import DaemonProcess
from tests.protocol.test_version_1 import (  # noqa: F401  (run again, here)
    prompt,
    test_commands_without_id_run_in_the_order_they_came,
    test_generate_from_file_to_file,
    test_inline_snapshot_restore_list_free,
    test_park_and_unpark_say_what_changed,
    test_snapshot_holds_prompt_and_answer,
    test_the_sampler_tail,
)
from tests.protocol.test_version_2 import (  # noqa: F401  (run again, here)
    test_a_cancelled_command_without_any_other_end_gets_an_err_line,
    test_a_duplicate_id_is_refused_and_the_first_lives_on,
    test_an_answer_with_an_id,
    test_cancel_while_decoding_prefilling_and_queued,
    test_done_leaves_before_the_minus_one,
    test_every_command_gets_exactly_one_terminal_event,
    test_requests_run_side_by_side_and_each_equals_its_lone_run,
    test_status_answers_while_a_prefill_runs,
    test_stop_ids_min_tokens_and_logprobs,
)


@pytest.fixture(autouse=True)
def in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTD_ENGINE", "process")


@pytest.fixture
def daemon(tiny_llama: Path, in_a_process: None) -> Iterator[DaemonProcess]:
    with DaemonProcess(tiny_llama, "--max-ctx=512") as process:
        yield process
        assert process.wait_json_of("PROPS", "props")["engine"] == "process"
