"""Ten agent tasks over one long list of tools, under a limit that forces out-of-memory (S133, S134).

First with a client of the test's own, whose every answer is compared, then through the real client at the
length of the source's prompts. `python -m tests.bench.agent` prints the numbers.

Why one of the loops under `seed` has a trim interval. That policy frees every slot, so the request behind a
failure computes its whole prompt again, and without a trim rung all buffers of that computation stay cached:
the retry needs more than any request that starts from a slot. Where the blocks of one long prefill are what
fills the memory, the retry fails as the first try did (what the source's trim patch is for, S148). Where the
slots fill it, `seed` needs no trim: they are gone when the request comes again.
"""

from __future__ import annotations

from array import array
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotd.protocol.messages import AllCleared, Event, SnapInline, Tokens
from slotd.protocol.wire import parse_event
from tests.fakes.agent_loop import N_TASKS, N_TOOLS, Outcome, run_agent
from tests.fakes.daemon_process import DaemonProcess
from tests.fakes.tiny_gguf import write_tiny_llama

N_CALLS, N_GEN = 2, 8
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
    """One long prefill nearly fills the limit (see above): the trim interval is what lets the retry pass."""
    flags = ("--memory-limit=20MiB", "--prefill-pool-trim-tokens=256")
    agent, said, recovery = run(model, "seed", *flags)
    assert said == without_a_limit(model)
    assert 0 < agent.retries <= agent.cleared == recovery["all_cleared"]
    assert agent.calls == N_TASKS * N_CALLS + agent.retries


# ----- through the client, at the full length

#: Small pieces keep what one prefill leaves in the pool small beside what the slots hold.
LONG_FLAGS = ("--max-ctx=32768", "--chunk=16", "--exact")


def run_long(model: Path, *flags: str) -> Outcome:
    return run_agent(model, 56, [*LONG_FLAGS, *flags], prefix_slots=7, question_words=1100)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agent") / "long.gguf"
    return write_tiny_llama(path, n_ctx=32768, n_layer=2, n_embd=32, n_head=1, n_head_kv=1, n_ff=32)


@cache
def long_without_a_limit(model: Path) -> Outcome:
    return run_long(model)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("policy", "limit"), [("ladder", 20), ("seed", 28)])
def test_s133_at_full_length_through_the_client(long_model: Path, policy: str, limit: int) -> None:
    """Prompts of about 17,000 tokens. `seed` without a trim interval: at most one retry for each recovery."""
    free = long_without_a_limit(long_model)
    outcome = run_long(long_model, f"--memory-limit={limit}MiB", f"--oom-policy={policy}")
    print(f"{policy}: {outcome}")
    assert 16_000 <= outcome.longest <= 18_000
    assert outcome.answers == free.answers
    check(outcome, policy)


@pytest.mark.model
@pytest.mark.timeout(900)
def test_s133_smollm2(default_model: Path) -> None:
    """A real model, prompts of about 2,000 tokens, short answers. `seed`: `python -m tests.bench.agent`."""
    flags = ["--max-ctx=4096", "--memory-limit=740MiB", "--oom-policy=ladder"]
    outcome = run_agent(default_model, 22, flags, prefix_slots=7, question_words=300, max_tokens=4)
    print(outcome)
    assert 2_000 <= outcome.longest <= 2_500
    check(outcome, "ladder")


def check(outcome: Outcome, policy: str) -> None:
    """Everything done; `ladder` with one clean call each, `seed` with one retry for each recovery at most."""
    assert outcome.completed == N_TASKS
    assert outcome.recoveries > 0
    if policy == "ladder":
        assert (outcome.calls, outcome.retries) == (N_TASKS * N_CALLS, 0)
    else:
        assert 0 < outcome.retries <= outcome.cleared == outcome.recovery["all_cleared"]
