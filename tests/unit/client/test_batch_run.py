"""`slotd batch` with files: resume, publication, exit codes, Ctrl-C, locks."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from slotd.client import batch_run
from slotd.client.batch_run import Files, check_files
from slotd.client.completion import Completion
from slotd.protocol.errors import ConfigError, DaemonDiedError, DaemonStartError, RequestError
from tests.fakes.fake_client import FakeClient, completion


class Setup:
    """An input of four jobs, an output, and a run."""

    def __init__(self, folder: Path) -> None:
        self.source, self.out, self.part = folder / "in", folder / "out", folder / "out.part"
        self.write(["a", "b", "c", "d"])

    def write(self, ids: list[str]) -> None:
        jobs = [json.dumps({"id": name, "prompt": name}) + "\n" for name in ids]
        self.source.write_text("".join(jobs))

    def run(self, client: FakeClient, *, resume: bool = False, **options: Any) -> int:
        files = check_files(str(self.source), str(self.out), resume=resume, stream=False)
        known: dict[str, Any] = {"parallel": 1, "defaults": {}, "model": "m", "settings": ("m",)}
        return batch_run.run(files, lambda: client, **(known | options))

    def ids(self) -> list[str]:
        return [json.loads(line)["id"] for line in self.out.read_bytes().splitlines()]


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


def asked(client: FakeClient) -> list[str]:
    return [request["prompt"] for request in client.requests]


def stop_at(name: str, error: BaseException) -> FakeClient:
    def answer(request: dict[str, Any]) -> Completion:
        if request["prompt"] == name:
            raise error
        return completion()

    return FakeClient(answer)


def test_output_in_input_order_whatever_finishes_first(setup: Setup) -> None:
    last_is_done = threading.Event()

    def answer(request: dict[str, Any]) -> Completion:
        if request["prompt"] == "d":
            last_is_done.set()
        else:
            last_is_done.wait(20)
        return completion()

    client = FakeClient(answer)
    assert setup.run(client, parallel=4) == 0
    assert setup.ids() == ["a", "b", "c", "d"]
    assert client.closed
    assert not setup.part.exists()


def test_exit_code_1_when_a_job_failed(setup: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    assert setup.run(stop_at("b", RequestError("oom"))) == 1
    assert setup.ids() == ["a", "b", "c", "d"]
    assert "1 of 4 jobs failed" in capsys.readouterr().err


def test_a_stopped_run_keeps_its_records_and_resume_makes_only_the_others(
    setup: Setup, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DaemonStartError):
        setup.run(stop_at("c", DaemonStartError("no")))
    assert not setup.out.exists()
    assert setup.part.read_bytes().count(b"\n") == 2
    assert f"slotd batch {setup.source} -o {setup.out} --resume" in capsys.readouterr().err.replace("\n", " ")
    client = FakeClient()
    assert setup.run(client, resume=True) == 0
    assert asked(client) == ["c", "d"]
    assert setup.ids() == ["a", "b", "c", "d"]
    assert not setup.part.exists()


def test_resume_after_a_torn_line(setup: Setup) -> None:
    with pytest.raises(DaemonStartError):
        setup.run(stop_at("d", DaemonStartError("no")))
    setup.part.write_bytes(setup.part.read_bytes()[:-5])
    client = FakeClient()
    assert setup.run(client, resume=True) == 0
    assert asked(client) == ["c", "d"]
    assert setup.ids() == ["a", "b", "c", "d"]


def test_resume_redoes_lines_that_changed_or_moved(setup: Setup) -> None:
    with pytest.raises(DaemonStartError):
        setup.run(stop_at("d", DaemonStartError("no")))
    setup.write(["a", "B", "d", "c"])
    client = FakeClient()
    assert setup.run(client, resume=True) == 0
    assert asked(client) == ["B", "d", "c"]
    assert setup.ids() == ["a", "B", "d", "c"]


def test_resume_with_other_settings_redoes_all(setup: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DaemonStartError):
        setup.run(stop_at("c", DaemonStartError("no")))
    for changed in ({"settings": ("other model",)}, {"defaults": {"temperature": 0.5}}):
        client = stop_at("c", DaemonStartError("no"))
        with pytest.raises(DaemonStartError):
            setup.run(client, resume=True, **changed)
        assert asked(client) == ["a", "b", "c"]
    assert "made with other settings" in capsys.readouterr().err


def test_resume_counts_the_failures_it_takes(setup: Setup) -> None:
    def answer(request: dict[str, Any]) -> Completion:
        if request["prompt"] == "a":
            raise RequestError("overflow")
        if request["prompt"] == "c":
            raise DaemonStartError("no")
        return completion()

    with pytest.raises(DaemonStartError):
        setup.run(FakeClient(answer))
    client = FakeClient()
    assert setup.run(client, resume=True) == 1
    assert asked(client) == ["c", "d"]


def test_resume_with_nothing_there_starts_at_the_first_line(
    setup: Setup, capsys: pytest.CaptureFixture[str]
) -> None:
    assert setup.run(FakeClient(), resume=True) == 0
    assert setup.ids() == ["a", "b", "c", "d"]
    assert "nothing to resume" in capsys.readouterr().err


def test_resume_of_a_complete_run_is_refused_and_the_output_stays(setup: Setup) -> None:
    assert setup.run(FakeClient()) == 0
    before = setup.out.read_bytes()
    client = FakeClient()
    with pytest.raises(ConfigError, match="out is complete, there is nothing to resume: remove it, or run"):
        setup.run(client, resume=True)
    assert (client.requests, setup.out.read_bytes()) == ([], before)
    assert setup.run(client) == 0  # without --resume it starts over


def test_records_of_a_stopped_run_are_not_thrown_away_by_mistake(setup: Setup) -> None:
    with pytest.raises(DaemonStartError):
        setup.run(stop_at("c", DaemonStartError("no")))
    before = setup.part.read_bytes()
    with pytest.raises(ConfigError, match="--resume"):
        setup.run(FakeClient())
    assert setup.part.read_bytes() == before


def test_the_second_batch_on_an_output_is_refused(setup: Setup) -> None:
    inside, go = threading.Event(), threading.Event()

    def answer(request: dict[str, Any]) -> Completion:
        inside.set()
        go.wait(20)
        return completion()

    first = threading.Thread(target=setup.run, args=(FakeClient(answer),))
    first.start()
    assert inside.wait(20)
    second = FakeClient()
    with pytest.raises(ConfigError, match="another batch is writing"):
        setup.run(second)
    go.set()
    first.join(20)
    assert second.requests == []
    assert setup.ids() == ["a", "b", "c", "d"]


def test_an_empty_input_gives_an_empty_output(setup: Setup) -> None:
    setup.source.write_text("\n\n")
    assert setup.run(FakeClient()) == 0
    assert setup.out.read_bytes() == b""
    assert not setup.part.exists()


def test_an_old_output_stays_until_the_new_one_is_whole(setup: Setup) -> None:
    setup.out.write_text("old")
    with pytest.raises(DaemonStartError):
        setup.run(stop_at("c", DaemonStartError("no")))
    assert setup.out.read_text() == "old"
    assert setup.run(FakeClient(), resume=True) == 0
    assert setup.ids() == ["a", "b", "c", "d"]


def test_a_client_that_does_not_come_up_leaves_nothing(setup: Setup) -> None:
    files = check_files(str(setup.source), str(setup.out), resume=False, stream=False)

    def no_client() -> FakeClient:
        raise DaemonStartError("no")

    with pytest.raises(DaemonStartError):
        batch_run.run(files, no_client, parallel=1, defaults={}, model="m", settings=())
    assert sorted(path.name for path in setup.out.parent.iterdir()) == ["in"]


def test_a_death_is_retried_and_costs_nothing(setup: Setup) -> None:
    deaths = iter([DaemonDiedError("gone")])

    def answer(request: dict[str, Any]) -> Completion:
        error = next(deaths, None) if request["prompt"] == "b" else None
        if error is not None:
            raise error
        return completion()

    assert setup.run(FakeClient(answer)) == 0
    assert setup.ids() == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("source", "out", "options", "words"),
    [
        ("in", None, {}, "-o OUT.jsonl is missing"),
        ("nope", "out", {}, "no such file"),
        (".", "out", {}, "no such file"),
        ("in", "-", {"resume": True}, "--resume needs an output file"),
        ("in", "out", {"stream": True}, "--stream needs the output -"),
        ("in", "nowhere/out", {}, "folder does not exist"),
    ],
)
def test_what_cannot_go_together_is_refused_before_anything_runs(
    tmp_path: Path, source: str, out: str | None, options: dict[str, bool], words: str
) -> None:
    (tmp_path / "in").write_text("")
    full = None if out is None else out if out == "-" else str(tmp_path / out)
    with pytest.raises(ConfigError, match=words):
        check_files(str(tmp_path / source), full, **({"resume": False, "stream": False} | options))


def test_stdin_goes_to_stdout_unless_a_file_is_named() -> None:
    assert check_files("-", None, resume=False, stream=True) == Files("-", "-", False, True)


def test_an_output_that_is_there_is_replaced_at_the_end_and_that_is_said(
    setup: Setup, capsys: pytest.CaptureFixture[str]
) -> None:
    assert setup.run(FakeClient()) == 0
    assert "replaced" not in capsys.readouterr().err
    setup.write(["x", "y"])
    with pytest.raises(KeyboardInterrupt):
        setup.run(stop_at("y", KeyboardInterrupt()))
    assert setup.ids() == ["a", "b", "c", "d"]  # until then it is the old one
    setup.part.unlink()
    capsys.readouterr()
    assert setup.run(FakeClient()) == 0
    assert "out is there already: it is replaced when all jobs are done" in capsys.readouterr().err
    assert setup.ids() == ["x", "y"]
