"""What each way to multiply costs in accuracy: logits beside those of the NumPy float32 forward.

    python -m tests.bench.accuracy MODEL --math exact q8 fast

On the golden prompts, and on 2,000 tokens of text as a prompt in pieces and as steps of some rows. The NumPy
forward dequantises the file's weights and is computed along, piece by piece. Prints JSON, then a table in
Markdown. The text is a file of this repository: its hash says whether two runs had the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slotd.client.tokenizer import Tokenizer
from slotd.daemon.config import MATH, Config
from slotd.daemon.engine import Engine
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.sequence import Sequence
from slotd.daemon.serve import build_engine
from slotd.protocol.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "data" / "smollm2_greedy.json"
TEXT = ROOT / "protocol" / "PROTOCOL.md"

#: Tokens of a piece of the text: enough for whatever begins at a number of rows.
PIECE = 512

Logits = npt.NDArray[np.float32]


@dataclass(slots=True)
class Difference:
    """Logits beside the expected ones.

    Attributes:
        rows: compared.
        worst, total, count: absolute differences: the largest, their sum, their number.
        flips: rows whose best token is another.
        least_gap, largest_gap: between the two best expected logits of such rows.
    """

    rows: int = 0
    worst: float = 0.0
    total: float = 0.0
    count: int = 0
    flips: int = 0
    least_gap: float | None = None
    largest_gap: float | None = None

    def add(self, got: Logits, expected: Logits) -> None:
        """Take in rows, [n, n_vocab] each."""
        off = np.abs(got - expected)
        self.rows += len(off)
        self.worst = max(self.worst, float(off.max()))
        self.total += float(off.sum(dtype=np.float64))
        self.count += off.size
        flipped = got.argmax(axis=1) != expected.argmax(axis=1)
        self.flips += int(flipped.sum())
        if flipped.any():
            best = np.partition(expected[flipped], -2, axis=1)[:, -2:]
            gaps = np.abs(best[:, 1] - best[:, 0])
            known = [gap for gap in (self.least_gap, self.largest_gap) if gap is not None]
            known += gaps.tolist()
            self.least_gap, self.largest_gap = min(known), max(known)

    def report(self) -> dict[str, float | int | None]:
        """As the table shows it."""
        return {
            "tokens": self.rows, "max": self.worst, "mean": self.total / max(self.count, 1),
            "argmax_agreement": 1 - self.flips / max(self.rows, 1), "least_gap_flipped": self.least_gap,
            "largest_gap_flipped": self.largest_gap,
        }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.accuracy", description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )  # fmt: skip
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--math", nargs="+", choices=MATH, default=["exact"])
    parser.add_argument("--kv", nargs="+", default=["f16"], help="types of K and V [default: f16]")
    parser.add_argument("--text", type=Path, default=TEXT, help="[default: the protocol's description]")
    parser.add_argument("--tokens", type=int, default=2000, help="of the text [default: 2000]")
    parser.add_argument("--rows", type=int, default=8, help="of a step, 1 to 64 [default: 8]")
    parser.add_argument("--device", default="auto", help="as the daemon's [default: auto]")
    chosen = parser.parse_args()
    tokenizer = Tokenizer.from_file(chosen.model)
    prompts = [tokenizer.encode(case["text"]) for case in json.loads(GOLDEN.read_text("utf-8"))["cases"]]
    text = tokenizer.encode(chosen.text.read_text("utf-8"))[: chosen.tokens]
    longest = max(len(ids) for ids in (*prompts, text)) + 1
    config = Config(model=chosen.model, max_ctx=longest, host_cache=0, slots=1)
    host = build_engine(replace(config, device="cpu"))
    entries = []
    for math in chosen.math:
        for kv in chosen.kv:
            try:
                engine = build_engine(replace(config, device=chosen.device, math=math, k_type=kv, v_type=kv))
            except ConfigError as error:
                print(f"{math}: {error}", file=sys.stderr)
                continue
            about = {"model": chosen.model.name, "text": _digest(text), **engine.backend.report()}
            for name, difference in measure(host, engine, prompts, text, chosen.rows).items():
                entry = {**about, "kv": kv, "on": name, **difference.report()}
                print(json.dumps(entry), flush=True)
                entries.append(entry)
            engine.park()
    print("\n" + table(entries))
    return 0


def measure(
    host: Engine, engine: Engine, prompts: list[list[int]], text: list[int], rows: int
) -> dict[str, Difference]:
    """By what was computed. rows: of a step."""
    found = {
        "golden prompts": Difference(), "text, prompt": Difference(), f"text, steps of {rows}": Difference(),
    }  # fmt: skip
    golden, prompt, steps = found.values()
    for ids in prompts:
        for expected, got in zip(pieces(host, ids), pieces(engine, ids), strict=True):
            golden.add(got, expected)
    stepped = engine.open()
    start = 0
    for expected, got in zip(pieces(host, text), pieces(engine, text), strict=True):
        prompt.add(got, expected)
        for first in range(0, len(expected), rows):
            some = expected[first : first + rows]
            at = start + first
            steps.add(forward(engine, stepped, text[at : at + len(some)], Kind.STEP), some)
        start += len(expected)
    engine.close(stepped)
    return found


def pieces(engine: Engine, ids: list[int]) -> Iterator[Logits]:
    """The logits of every token, piece by piece."""
    sequence = engine.open()
    for start in range(0, len(ids), PIECE):
        yield forward(engine, sequence, ids[start : start + PIECE], Kind.PROMPT)
    engine.close(sequence)


def forward(engine: Engine, sequence: Sequence, ids: list[int], kind: Kind) -> Logits:
    """Compute and commit rows; the logits of each."""
    logits = engine.forward(Rows.chain(sequence, ids, logits="all"), kind).logits.copy()
    engine.commit(sequence, range(len(ids)))
    return logits


def table(entries: list[dict[str, Any]]) -> str:
    """As Markdown."""
    lines = [
        "| math | K/V | on | tokens | max | mean | argmax agrees | gaps where not |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry in entries:
        gaps = "-"
        if entry["least_gap_flipped"] is not None:
            gaps = f"{entry['least_gap_flipped']:.4f} to {entry['largest_gap_flipped']:.4f}"
        lines.append(
            f"| {entry['math']} | {entry['kv']} | {entry['on']} | {entry['tokens']:,} | {entry['max']:.4f} "
            f"| {entry['mean']:.5f} | {entry['argmax_agreement']:.2%} | {gaps} |"
        )
    return "\n".join(lines)


def _digest(ids: list[int]) -> str:
    return hashlib.blake2b(np.array(ids, np.int32).tobytes(), digest_size=8).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
