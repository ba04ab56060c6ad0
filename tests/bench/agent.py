"""``python -m tests.bench.agent``: the agent loop of S133 under both policies, on SmolLM2 and at full length.

Prints what tests/e2e/test_agent_loop.py asserts, and the seconds that it took. ``MODEL`` as an argument: that
file in place of the default model.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from slotd.client.fetch import resolve_model
from tests.fakes.agent_loop import run_agent
from tests.fakes.tiny_gguf import write_tiny_llama

#: name -> (limit in MiB for each policy, flags, words of a tool's description, of a task's question)
SMOLLM2 = ({"ladder": 740, "seed": 800}, ["--max-ctx=4096"], 22, 300)
LONG = ({"ladder": 20, "seed": 28}, ["--max-ctx=32768", "--chunk=16", "--exact"], 56, 1100)


def main(model: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tiny = write_tiny_llama(
            Path(folder) / "long.gguf", n_ctx=32768, n_layer=2, n_embd=32, n_head=1, n_head_kv=1, n_ff=32
        )
        real = Path(resolve_model(model, fetch=model is None))
        for name, path, (limits, flags, words, question) in (
            ("tiny", tiny, LONG),
            ("SmolLM2", real, SMOLLM2),
        ):
            for policy, limit in [("ladder", 0), *limits.items()]:
                bound = [f"--memory-limit={limit}MiB"] if limit else []
                began = time.perf_counter()
                outcome = run_agent(
                    path, words, [*flags, *bound, f"--oom-policy={policy}"], prefix_slots=7,
                    question_words=question, max_tokens=4,
                )  # fmt: skip
                seconds = time.perf_counter() - began
                said = f"{policy}, {limit} MiB" if limit else "no limit"
                print(f"{name} ({said}): {outcome}; {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:2])
