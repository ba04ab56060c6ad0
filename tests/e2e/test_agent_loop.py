"""Ten agent tasks over one long list of tools, under a limit that forces out-of-memory (S133, S134)."""

from __future__ import annotations

from array import array
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotd.protocol.messages import AllCleared, Event, SnapInline, Tokens
from slotd.protocol.wire import parse_event
from tests.fakes.daemon_process import DaemonProcess
from tests.fakes.tiny_gguf import write_tiny_llama

N_TASKS, N_TOOLS, N_CALLS, N_GEN = 10, 31, 2, 8
SLOTS = 8
FLAGS = ("--max-ctx=4096", "--chunk=128", f"--slots={SLOTS}", "--exact")

_rng = np.random.default_rng(133)
#: The definitions of all tools: the prefix of every prompt.
TOOLS = _rng.integers(3, 300, N_TOOLS * 60).tolist()
QUESTIONS = [_rng.integers(3, 300, 90).tolist() for _ in range(N_TASKS)]
#: What the tools answered.
RESULTS = [[_rng.integers(3, 300, 180).tolist() for _ in range(N_CALLS)] for _ in range(N_TASKS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(
        tmp_path_factory.mktemp("agent") / "agent.gguf", n_ctx=4096, n_layer=6, n_head_kv=4
    )


class Agent:
    """A client that keeps every prompt in a slot, and goes on from the deepest one that fits.

    Attributes:
        held: slot -> the ids it holds, as far as the client knows.
        calls: requests sent.
        retries: of those, requests sent again after `oom`.
    """

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        self.held: dict[int, list[int]] = {}
        self.calls = self.retries = self.cleared = self.reused = 0
        self._next = 1

    def ask(self, prompt: list[int]) -> list[int]:
        """The answer; sent once more when memory ran out."""
        answer = self._send(prompt)
        if answer is None:
            self.retries += 1
            answer = self._send(prompt)
        assert answer is not None
        return answer

    def _send(self, prompt: list[int]) -> list[int] | None:
        self.calls += 1
        request_id = f"c{self.calls}"
        known = [slot for slot, ids in self.held.items() if prompt[: len(ids)] == ids]
        best = max(known, key=lambda slot: len(self.held[slot]), default=None)
        at, slot = (len(prompt), self._free_slot()) if 0 in self.held else (len(TOOLS), 0)
        start = "-" if best is None else f"RESTORE {best} -"
        ids = ",".join(map(str, prompt))
        seen = len(self.daemon.lines)
        self.daemon.send(f"{start} {N_GEN} ids={ids} id={request_id} snap={at}:{slot} ignore_eos=1")
        done = self.daemon.wait_done(request_id)
        answer = array("i")
        for line in self.daemon.lines[seen:]:
            event = parse_event(line)
            if isinstance(event, Tokens):
                answer.extend(event.ids)
            self._take(event, prompt)
        if done.status == "err":
            assert done.fields["code"] == "oom"
            return None
        assert int(done.fields["epoch"]) == self.cleared
        self.reused += int(done.fields["reused"])
        return answer.tolist()

    def _free_slot(self) -> int:
        self._next = self._next % (SLOTS - 1) + 1
        self.held.pop(self._next, None)
        return self._next

    def _take(self, event: Event, prompt: list[int]) -> None:
        if isinstance(event, SnapInline):
            self.held[event.slot] = prompt[: event.cur_pos]
        if isinstance(event, AllCleared):
            self.cleared += 1
            assert event.epoch == self.cleared
            for slot in event.freed:
                self.held.pop(slot, None)

    def run(self) -> list[list[int]]:
        """All tasks; every answer and tool result goes into the next prompt of its task."""
        said = []
        for question, results in zip(QUESTIONS, RESULTS, strict=True):
            prompt = TOOLS + question
            for result in results:
                answer = self.ask(prompt)
                said.append(answer)
                prompt = prompt + answer + result
        return said


@cache
def without_a_limit(model: Path) -> list[list[int]]:
    with DaemonProcess(model, *FLAGS) as daemon:
        return Agent(daemon).run()


def run(model: Path, policy: str, *flags: str) -> tuple[Agent, list[list[int]], dict[str, Any]]:
    with DaemonProcess(model, *FLAGS, f"--oom-policy={policy}", *flags) as daemon:
        agent, pid = Agent(daemon), daemon.process.pid
        said = agent.run()
        daemon.send("STATUS")
        status = daemon.wait_json("status")
        assert (daemon.process.pid, daemon.process.poll()) == (pid, None)
        assert set(agent.held) == {int(slot) for slot in status["slots"]}
        return agent, said, status["recovery"]


def test_s133_the_ladder_completes_every_task_with_one_clean_call_each(model: Path) -> None:
    """With a host tier nothing is lost at all; without one slots are cleared now and then."""
    for flags, lossless in (((), True), (("--host-cache=0",), False)):
        agent, said, recovery = run(model, "ladder", "--memory-limit=17MiB", *flags)
        assert said == without_a_limit(model)
        assert (agent.calls, agent.retries) == (N_TASKS * N_CALLS, 0)
        assert sum(recovery["oom"].values()) > 0
        assert "fail" not in recovery["rungs"]
        assert recovery["rungs"]["move" if lossless else "clear"] > 0
        assert (agent.cleared == 0) is lossless


def test_s133_seed_completes_every_task_with_one_retry_for_each_recovery(model: Path) -> None:
    """The trim interval keeps one long prefill within the limit, as headroom does in S134."""
    flags = ("--memory-limit=20MiB", "--prefill-pool-trim-tokens=256")
    agent, said, recovery = run(model, "seed", *flags)
    assert said == without_a_limit(model)
    assert 0 < agent.retries <= agent.cleared == recovery["all_cleared"]
    assert agent.calls == N_TASKS * N_CALLS + agent.retries
