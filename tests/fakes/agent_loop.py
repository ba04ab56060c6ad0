"""An agent's work through the client: ten tasks over one long list of tools, as in S133 of the reference.

Every task is a conversation whose system message holds the definitions of all tools. The model is asked,
"calls a tool", gets its result as the next turn, and is asked again. What the model says does not matter;
that each call is answered does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slotd.client import Client, Completion, RequestError

N_TASKS, N_TOOLS, N_CALLS = 10, 31, 2

Message = dict[str, str]

_WORDS = (
    "file", "path", "text", "line", "number", "folder", "name", "size", "list", "date", "query", "page",
    "user", "value", "count", "reads", "writes", "finds", "the", "a", "of", "in", "with", "from",
    "each", "one", "must", "not", "be", "empty", "optional", "returns", "error", "when", "missing",
    "sorted", "newest", "first",
)  # fmt: skip


@dataclass(slots=True)
class Outcome:
    """What a loop came to.

    Attributes:
        calls: requests sent; retries of them were sent again after `oom`.
        answers: ids of each answered call, in order.
        completed: tasks all of whose calls were answered.
        cleared: announcements heard.
        cached: of `prompt` tokens in all answered calls.
        recovery: the counters of STATUS at the end.
    """

    calls: int = 0
    retries: int = 0
    completed: int = 0
    cleared: int = 0
    prompt: int = 0
    cached: int = 0
    longest: int = 0
    answers: list[tuple[int, ...]] = field(default_factory=list)
    recovery: dict[str, Any] = field(default_factory=dict)

    @property
    def recoveries(self) -> int:
        """How often memory ran out and the daemon went on."""
        return sum(self.recovery["oom"].values())

    def __str__(self) -> str:
        share = self.cached / self.prompt if self.prompt else 0.0
        return (
            f"{self.completed}/{N_TASKS} tasks, {self.calls} calls, {self.retries} retries, "
            f"{self.recoveries} recoveries, {self.cleared} all-cleared, rungs {self.recovery['rungs']}, "
            f"longest prompt {self.longest}, {share:.0%} of {self.prompt} prompt tokens reused"
        )


def tools(words: int) -> str:
    """The definitions of all tools as JSON, each with a description of so many words."""
    chance = random.Random(133)
    return "\n".join(
        json.dumps({
            "name": f"tool_{number}",
            "description": " ".join(chance.choices(_WORDS, k=words)),
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        })
        for number in range(N_TOOLS)
    )  # fmt: skip


class AgentLoop:
    """The tasks of one agent.

    Args:
        client: who answers; with caches, as a user has it.
        words: of each tool's description.
        question_words, result_words: of each task's first message, and of each tool's result.
    """

    def __init__(
        self, client: Client, words: int, *, question_words: int = 20, result_words: int = 60,
        max_tokens: int = 8,
    ) -> None:  # fmt: skip
        self._client = client
        self._question_words = question_words
        self._max_tokens = max_tokens
        self._chance = random.Random(7)
        self._result_words = result_words
        self._system = {"role": "system", "content": "You may call these tools.\n" + tools(words)}
        self.outcome = Outcome()
        client.on_all_cleared(self._count_cleared)

    def _count_cleared(self, _: object) -> None:
        self.outcome.cleared += 1

    def run(self, n_tasks: int = N_TASKS) -> Outcome:
        """All tasks, one after the other; a call is sent once more when memory ran out."""
        for number in range(n_tasks):
            messages = [
                self._system,
                {"role": "user", "content": f"Task {number}: {self._text(self._question_words)}"},
            ]
            answered = 0
            for _ in range(N_CALLS):
                answer = self._ask(messages)
                if answer is None:
                    break
                answered += 1
                messages.append({"role": "assistant", "content": f'{{"name": "tool_{number}"}}'})
                messages.append({"role": "user", "content": f"Result: {self._text(self._result_words)}"})
            self.outcome.completed += answered == N_CALLS
        self.outcome.recovery = self._client.status()["recovery"]
        return self.outcome

    def _text(self, words: int) -> str:
        return " ".join(self._chance.choices(_WORDS, k=words))

    def _ask(self, messages: Sequence[Message]) -> Completion | None:
        for attempt in range(2):
            self.outcome.calls += 1
            self.outcome.retries += attempt
            try:
                answer = self._client.chat(
                    messages, max_tokens=self._max_tokens, temperature=0, ignore_eos=True
                )
            except RequestError as error:
                if error.code != "oom":
                    raise
                continue
            self.outcome.answers.append(answer.ids)
            self.outcome.prompt += answer.prompt_tokens
            self.outcome.cached += answer.cached_tokens
            self.outcome.longest = max(self.outcome.longest, answer.prompt_tokens)
            return answer
        return None


def run_agent(
    model: Path, words: int, flags: Sequence[str], *, prefix_slots: int = 4, **lengths: int
) -> Outcome:
    """One daemon of its own, one loop."""
    with Client(model, daemon_args=flags, prefix_slots=prefix_slots) as client:
        pid = client.pid
        outcome = AgentLoop(client, words, **lengths).run()
        assert client.pid == pid, "the daemon was replaced"
        return outcome
