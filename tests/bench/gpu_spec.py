"""What a speculative step costs, part by part, and what that makes in tokens per second.

    python -m tests.bench.gpu_spec --model 135m qwen35-27b [--depth 2048 32768] [--accept 4 6 8]
    python -m tests.bench.gpu_spec -m SmolLM2-135M-Instruct.Q4_1.gguf

Plain greedy decoding records a text first. Then the draft runs as it would, but its answer becomes that text
for as many tokens as a step is to take, and something else behind them: acceptance is forced. --accept 0
takes what the draft says; with the file of the default model and its own draft that means something. Models
and drafts are random ones, written once into --folder. One JSON line for each figure: medians of
milliseconds of a step and of its parts, as the host sees them. What a part enqueues and nobody waits for
shows where the next one waits: context (commit) in draft.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from slotd.daemon.cuda_backend import CudaBackend
from slotd.daemon.draft_rows import Proposals
from slotd.daemon.drafters import draft_for
from slotd.daemon.engine import Engine
from slotd.daemon.memory.cuda_memory import CudaMemory, CupyDevice
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.sequence import Sequence
from slotd.daemon.spec.tree import DraftTree, build_tree
from slotd.daemon.weights.reader import open_model
from tests.bench.draft_shapes import DRAFTS
from tests.bench.model_shapes import PRESETS
from tests.bench.synthetic_gguf import write_synthetic, write_synthetic_draft

PARTS = ("draft", "tree", "verify", "walk", "commit")

MODELS = tuple(name.removesuffix("-draft") for name in DRAFTS)

WARM, CHUNK, WIDTH = 6, 2048, 8


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gpu_spec", description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["135m", "qwen35-27b"])
    parser.add_argument(
        "-m", dest="path", type=Path, help="a target's file, with --draft or a draft of its own"
    )
    parser.add_argument("--draft", type=Path, help="of -m [default: its own]")
    parser.add_argument("--depth", nargs="+", type=int, default=[2048])
    parser.add_argument("--accept", nargs="+", type=int, default=[4, 6, 8])
    parser.add_argument("--budget", type=int, default=22)
    parser.add_argument(
        "--block", type=int, help="rows of a block [default: 8, the draft's own when it is wide]"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--math", choices=("exact", "q8", "fast"), default="exact")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "slotd-bench-models")
    chosen = parser.parse_args()
    files = {name: files_of(chosen.folder, name) for name in chosen.model}
    if chosen.path is not None:
        files = {chosen.path.stem: (chosen.path, chosen.draft)}
    for name, (path, draft) in files.items():
        bench = Bench(name, path, draft, chosen)
        for depth in chosen.depth:
            bench.measure(depth)
        bench.engine.park()


def files_of(folder: Path, name: str) -> tuple[Path, Path | None]:
    """A random target and a random draft, written when they are not there."""
    target, draft = folder / f"{name}-0.gguf", folder / f"{name}-draft-0.gguf"
    folder.mkdir(parents=True, exist_ok=True)
    for path, write in (
        (target, lambda new: write_synthetic(new, PRESETS[name])),
        (draft, lambda new: write_synthetic_draft(new, DRAFTS[f"{name}-draft"])),
    ):
        if not path.is_file():
            write(path.with_suffix(".new")).rename(path)
    return target, draft


class Bench:
    """One target with its draft."""

    def __init__(self, name: str, path: Path, draft: Path | None, chosen: argparse.Namespace) -> None:
        self.name, self.chosen = name, chosen
        self.n_text = text = (chosen.steps + WARM) * max(max(chosen.accept), 8)
        with open_model(path) as file:
            self.engine = Engine(
                file, CudaBackend(CudaMemory(CupyDevice()), chosen.math),
                draft=draft or draft_for(file.identity), max_ctx=max(chosen.depth) + text + 256,
            )  # fmt: skip
        assert self.engine.drafts, self.engine.drafting.refusal
        narrow = self.engine.hyper.n_embd < 2048
        self.block = chosen.block or (8 if narrow else self.engine.drafting.block_size)
        live = self.engine.memory_report()["live"]
        self.say("loaded", weights=live["weights"], draft=live["draft"], block=self.block)

    def say(self, what: str, **values: object) -> None:
        print(json.dumps({"figure": what, "model": self.name, **values}), flush=True)

    def measure(self, depth: int) -> None:
        engine = self.engine
        vocab = min(engine.hyper.n_vocab, 30_000)
        prompt = np.random.default_rng(depth).integers(5, vocab, depth).tolist()
        base = engine.open()
        began = time.perf_counter()
        for start in range(0, depth - 1, CHUNK):
            rows = Rows.chain(base, prompt[start : min(start + CHUNK, depth - 1)], logits="none")
            engine.forward(rows, Kind.PROMPT)
            engine.commit(base, range(len(rows)))
        engine.memory.check_device()
        self.say("prefill", depth=depth, seconds=round(time.perf_counter() - began, 4))
        text = self.plain(base, prompt[-1], depth)
        for accept in self.chosen.accept:
            self.drafted(base, text, depth, accept)
        engine.close(base)

    def plain(self, base: Sequence, pending: int, depth: int) -> list[int]:
        """What greedy decoding says, and what a step of it takes: with its rows for the draft."""
        engine = self.engine
        sequence, text, times = engine.fork(base), [pending], []
        for _ in range(self.n_text):
            began = time.perf_counter()
            ids, _ = engine.forward(Rows.next_tokens([sequence], [text[-1]]), Kind.STEP).greedy()
            engine.commit(sequence, [0])
            text.append(int(ids[0]))
            times.append(time.perf_counter() - began)
        engine.close(sequence)
        took = statistics.median(times[WARM:])
        self.say("plain", depth=depth, ms=round(1e3 * took, 3), tokens_per_s=round(1 / took, 1))
        return text

    def drafted(self, base: Sequence, text: list[int], depth: int, accept: int) -> None:
        """Steps that take `accept` tokens each; 0: as many as the draft guesses."""
        engine, chosen = self.engine, self.chosen
        sequence, at, peak = engine.fork(base), 0, 0
        times: dict[str, list[float]] = {part: [] for part in PARTS}
        taken: list[int] = []
        rows_of: list[int] = []
        for _ in range(chosen.steps + WARM):
            marks = [time.perf_counter()]
            found = engine.propose([sequence], [text[at]], self.block - 1, WIDTH)
            assert found is not None
            marks.append(time.perf_counter())
            if accept:
                found = forced(found, text[at + 1 : at + accept], text[at + accept])
            tree = build_tree(text[at], found.ids[0], found.logprobs[0], chosen.budget)
            rows = Rows.tree(sequence, tree.tokens.tolist(), tree.parents.tolist())
            marks.append(time.perf_counter())
            ids, _ = engine.forward(rows, Kind.STEP).greedy()
            marks.append(time.perf_counter())
            path = walk(tree, ids)
            marks.append(time.perf_counter())
            engine.commit(sequence, path)
            marks.append(time.perf_counter())
            expected = text[at + 1 : at + 1 + len(path)]
            if [int(ids[row]) for row in path] != expected:
                self.say(
                    "differs", depth=depth, at=at, got=[int(ids[row]) for row in path], expected=expected
                )
                break
            at += len(path)
            taken.append(len(path))
            rows_of.append(len(tree))
            peak = max(peak, engine.memory.live())
            for part, before, after in zip(PARTS, marks, marks[1:], strict=False):
                times[part].append(after - before)
            if at + max(accept, self.block) + 1 >= len(text):
                break
        engine.close(sequence)
        medians = {part: round(1e3 * statistics.median(all_[WARM:]), 3) for part, all_ in times.items()}
        whole = statistics.median([sum(step) for step in zip(*times.values(), strict=True)][WARM:])
        mean = statistics.mean(taken[WARM:])
        self.say(
            "step", depth=depth, accept=accept or "free", rows=max(rows_of), ms=round(1e3 * whole, 3),
            **medians, tokens_a_step=round(mean, 2), tokens_per_s=round(mean / whole, 1), steps=len(taken),
            peak_bytes=peak,
        )  # fmt: skip


def forced(found: Proposals, text: list[int], behind: int) -> Proposals:
    """The draft's answer with the text in front of each of its first positions, as if it were sure of it.

    behind: the token of the text that the position behind them must not have.
    """
    ids, logprobs = found.ids.copy(), found.logprobs.copy()
    for position, token in enumerate(text[: ids.shape[1]]):
        others = ids[0, position][ids[0, position] != token]
        ids[0, position] = [token, *others[: ids.shape[2] - 1]]
        logprobs[0, position] = np.minimum(logprobs[0, position], -3.0)
        logprobs[0, position, 0] = -1e-3
    if len(text) < ids.shape[1]:
        there = ids[0, len(text)]
        there[there == behind] = next(i for i in range(len(there) + 2) if i not in there and i != behind)
    return Proposals(ids, logprobs)


def walk(tree: DraftTree, ids: np.ndarray) -> list[int]:
    """The rows that are right: each child is what its parent's row says."""
    path: list[int] = []
    row: int | None = 0
    while row is not None:
        path.append(row)
        row = tree.child(row, int(ids[row]))
    return path


if __name__ == "__main__":
    main()
