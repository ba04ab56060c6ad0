"""DFlash drafts on the GPU: beside vectors and NumPy, the same bits in any company, answers as without."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotd.daemon.cuda_backend import CudaBackend
from slotd.daemon.cuda_draft import CudaDraft
from slotd.daemon.cuda_runner import CudaOutputs, CudaRunner
from slotd.daemon.draft_rows import Proposals
from slotd.daemon.drafters import draft_for
from slotd.daemon.engine import Engine
from slotd.daemon.memory.cuda_memory import CudaMemory, CupyDevice
from slotd.daemon.numpy_backend import NumpyBackend
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.sequence import Sequence
from slotd.daemon.spec.tree import build_tree
from slotd.daemon.weights.reader import open_model
from tests.bench.draft_shapes import DRAFTS
from tests.bench.model_shapes import PRESETS
from tests.bench.synthetic_gguf import write_synthetic, write_synthetic_draft

DATA = Path(__file__).parents[1] / "golden" / "data"
VECTORS = np.load(DATA / "dflash_smollm2.npz")


def device_engine(path: Path, draft: Path | None, draft_ctx: int = 2048) -> Engine:
    with open_model(path) as file:
        draft = draft or draft_for(file.identity)
        engine = Engine(
            file, CudaBackend(CudaMemory(CupyDevice())), max_ctx=4096, draft=draft, draft_ctx=draft_ctx
        )
    assert engine.drafts, engine.drafting.refusal
    return engine


@pytest.fixture(scope="module")
def engine(default_model: Path) -> Engine:
    return device_engine(default_model, None)


def started(engine: Engine, tokens: list[int], piece: int = 2048) -> Sequence:
    sequence = engine.open()
    for start in range(0, len(tokens), piece):
        rows = Rows.chain(sequence, tokens[start : start + piece], logits="none")
        engine.forward(rows, Kind.PROMPT)
        engine.commit(sequence, range(len(rows)))
    return sequence


def propose(
    engine: Engine, sequences: list[Sequence], tokens: list[int], depth: int = 7, width: int = 8
) -> Proposals:
    found = engine.propose(sequences, tokens, depth, width)
    assert found is not None, "no memory for the draft, see the log"
    return found


def features_of(engine: Engine, rows: np.ndarray) -> np.ndarray:
    """float32 [rows, width], of the last call."""
    runner = engine._loaded
    assert isinstance(runner, CudaRunner)
    assert runner._features is not None
    array, index = runner._features.of(rows)
    return array.get()[index].astype(np.float32)


def difference(got: Proposals, expected: Proposals) -> dict[str, Any]:
    """How far proposals are from each other; all that is printed when they are too far."""
    same = got.ids == expected.ids
    wide = np.abs(got.logprobs - expected.logprobs)
    return {
        "first ids": [got.ids[..., 0].tolist(), expected.ids[..., 0].tolist()],
        "same ids": f"{same.mean():.3f}",
        "by position": wide.max(axis=(0, 2)).round(4).tolist(),
        "largest": float(wide.max()),
        "finite": bool(np.isfinite(got.logprobs).all()),
    }


def assert_near(got: Proposals, expected: Proposals, limit: float, what: object) -> None:
    found = difference(got, expected)
    print(what, found)
    assert found["largest"] < limit, (what, found)
    gaps = expected.logprobs[..., 0] - expected.logprobs[..., 1]
    clear = gaps > 2 * limit
    assert (got.ids[..., 0] == expected.ids[..., 0])[clear].all(), (what, found, gaps.round(3).tolist())


def assert_same(got: Proposals, expected: Proposals, what: object) -> None:
    same = (got.ids == expected.ids).all() and (
        got.logprobs.view(np.uint32) == expected.logprobs.view(np.uint32)
    ).all()
    assert same, (what, difference(got, expected))


@pytest.mark.model
@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("block", [8, 16])
def test_vectors(engine: Engine, case: int, block: int) -> None:
    """Features, then the block on them: where the first goes wrong the second cannot be right."""
    *prompt, anchor = VECTORS[f"case{case}_ids"].tolist()
    sequence = engine.open()
    engine.forward(Rows.chain(sequence, prompt), Kind.PROMPT)
    features, wanted = features_of(engine, np.arange(len(prompt))), VECTORS[f"case{case}_features"]
    off = np.abs((features - wanted) / np.abs(wanted).max(axis=0))
    by_layer = off.reshape(len(prompt), 5, -1).max(axis=(0, 2))
    print(f"case {case}: features off by layer {by_layer.round(4).tolist()}")
    assert off.max() < 0.03, by_layer
    engine.commit(sequence, range(len(prompt)))
    got = propose(engine, [sequence], [anchor], block - 1)
    engine.close(sequence)
    ids, logits, sums = (
        VECTORS[f"case{case}_bs{block}_{name}"][1:] for name in ("top_ids", "top_logits", "logsumexp")
    )
    expected = Proposals(ids[None], (logits - sums[:, None])[None].astype(np.float32))
    assert_near(got, expected, 0.15, f"case {case}, block {block}")


@pytest.mark.model
def test_steps_leave_what_prompts_leave(engine: Engine) -> None:
    """Context of rows one by one, run ahead or not, of a tree and of a prompt."""
    *tokens, anchor = VECTORS["case0_ids"].tolist()
    prompt, rest = tokens[:20], tokens[20:]
    whole = started(engine, tokens)
    of_prompt = propose(engine, [whole], [anchor])

    chain = started(engine, prompt)
    for token in rest:
        engine.forward(Rows.next_tokens([chain], [token]), Kind.STEP).greedy()
        engine.commit(chain, [0])
    of_steps = propose(engine, [chain], [anchor])
    assert_near(of_steps, of_prompt, 0.1, "steps beside a prompt")

    tree = started(engine, prompt)
    at = 0
    while at < len(rest):
        part = rest[at : at + 5]
        junk = [(7 * i + 11) % 4000 for i in range(len(part))]
        ids = [x for pair in zip(part, junk, strict=True) for x in pair]  # row 2i is on the path
        parents = [max(-1, 2 * (i // 2) - 2) for i in range(len(ids))]
        engine.forward(Rows.tree(tree, ids, parents), Kind.STEP).greedy()
        engine.commit(tree, range(0, len(ids), 2))
        at += len(part)
    assert tree.tokens == chain.tokens
    assert_same(propose(engine, [tree], [anchor]), of_steps, "a tree's path beside its rows one by one")
    for sequence in (whole, chain, tree):
        engine.close(sequence)


@pytest.mark.model
def test_a_step_that_was_foreseen_leaves_its_features(engine: Engine) -> None:
    """Greedy decoding runs one step ahead: features of the step before must still be there."""
    *tokens, pending = VECTORS["case1_ids"].tolist()
    greedy = started(engine, tokens)
    answer = [pending]
    for _ in range(12):
        ids, finite = engine.forward(Rows.next_tokens([greedy], [answer[-1]]), Kind.STEP).greedy()
        assert finite.all()
        engine.commit(greedy, [0])
        answer.append(int(ids[0]))
    chain = started(engine, tokens)
    engine.forward(Rows.chain(chain, answer[:-1], logits="all"), Kind.STEP).greedy()
    engine.commit(chain, range(len(answer) - 1))
    got, expected = (propose(engine, [s], [answer[-1]]) for s in (greedy, chain))
    assert_same(got, expected, "run ahead beside a chain of rows")
    engine.close(greedy)
    engine.close(chain)


@pytest.mark.model
def test_rows_may_wait_until_they_are_asked_for(engine: Engine) -> None:
    """Contexts of steps that nobody asks after, more of them than features are kept of; rows taken back."""
    *tokens, pending = VECTORS["case1_ids"].tolist()
    waiting, at_once, others = (started(engine, tokens) for _ in range(3))
    runner = engine.drafting._runner
    assert isinstance(runner, CudaDraft)
    held = []
    for step in range(60):  # of 13 rows each
        ids = [(97 * step + 13 * i) % 4000 + 10 for i in range(12)]
        parents = [-1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        for sequence in (waiting, at_once):
            parts = [Rows.tree(sequence, ids, parents), Rows.next_tokens([others], [ids[0]])]
            engine.forward(Rows.join(parts), Kind.STEP).greedy()
            engine.commit(sequence, [0, 2, 4][: 1 + step % 3])
            if step % 5 == 0 and step:
                engine.truncate(sequence, len(sequence) - 2)
            if sequence is at_once:
                runner.finish()
            else:
                held.append(sum(len(rows.features) for rows in runner._left))
            engine.commit(others, [12])
    print(f"rows that wait: {held}")
    assert waiting.tokens == at_once.tokens
    assert max(held) > 0
    assert_same(
        propose(engine, [waiting], [pending]), propose(engine, [at_once], [pending]), "rows that wait"
    )
    for sequence in (waiting, at_once, others):
        engine.close(sequence)


@pytest.mark.model
def test_blocks_in_company_after_a_retire_and_with_a_slot(engine: Engine) -> None:
    cases = [VECTORS[f"case{case}_ids"].tolist() for case in range(3)]
    sequences = [started(engine, tokens[:-1]) for tokens in cases]
    anchors = [tokens[-1] for tokens in cases]
    alone = [propose(engine, [s], [t]) for s, t in zip(sequences, anchors, strict=True)]
    together = propose(engine, sequences, anchors)
    nine = propose(engine, sequences[:1] * 9, anchors[:1] * 9)  # more than a call takes: 72 rows
    for i, one in enumerate(alone):
        assert_same(Proposals(together.ids[[i]], together.logprobs[[i]]), one, f"case {i} beside others")
    for i in (0, 7, 8):
        assert_same(Proposals(nine.ids[[i]], nine.logprobs[[i]]), alone[0], f"number {i} of nine")
    live = engine.memory.live("draft")
    engine.memory.retire()
    assert_same(propose(engine, sequences, anchors), together, "after a retire")
    print(f"draft: {live / 1e6:.1f} MB with graphs, {engine.memory.live('draft') / 1e6:.1f} MB of one")
    forked = engine.fork(sequences[1])
    assert_same(propose(engine, [forked], [anchors[1]]), alone[1], "forked")
    for width in (1, 16):
        wide = propose(engine, sequences, anchors, 7, width)
        n = min(width, 8)
        assert (wide.ids[..., :n] == together.ids[..., :n]).all(), f"width {width}"
    for sequence in (*sequences, forked):
        engine.close(sequence)


@pytest.mark.model
def test_logits_of_a_step_stay_while_the_draft_runs(engine: Engine) -> None:
    *tokens, pending = VECTORS["case2_ids"].tolist()
    sequence = started(engine, tokens)
    for n in (1, 2, 5, 23):
        outputs = engine.forward(Rows.chain(sequence, [pending] * n, logits="all"), Kind.STEP)
        assert isinstance(outputs, CudaOutputs)
        runner = outputs._runner
        before = runner.fetch(outputs._device, n)
        engine.commit(sequence, range(n))
        propose(engine, [sequence], [pending])
        after = runner.fetch(outputs._device, n)
        assert (before.view(np.uint32) == after.view(np.uint32)).all(), f"{n} rows"
    engine.close(sequence)


def greedy_answer(engine: Engine, tokens: list[int], n: int) -> list[int]:
    """tokens and n more, the last of which is pending."""
    sequence = started(engine, tokens[:-1])
    answer = list(tokens)
    for _ in range(n):
        ids, _ = engine.forward(Rows.next_tokens([sequence], [answer[-1]]), Kind.STEP).greedy()
        engine.commit(sequence, [0])
        answer.append(int(ids[0]))
    engine.close(sequence)
    return answer


def drafted_answer(engine: Engine, tokens: list[int], n: int, budget: int) -> tuple[list[int], int]:
    """The same with trees, and how many steps it took."""
    sequence = started(engine, tokens[:-1])
    answer, steps = list(tokens), 0
    while len(answer) < len(tokens) + n:
        found = propose(engine, [sequence], [answer[-1]])
        tree = build_tree(answer[-1], found.ids[0], found.logprobs[0], budget)
        rows = Rows.tree(sequence, tree.tokens.tolist(), tree.parents.tolist())
        ids, finite = engine.forward(rows, Kind.STEP).greedy()
        assert finite.all()
        row: int | None = 0
        path = []
        while row is not None:
            path.append(row)
            answer.append(int(ids[row]))
            row = tree.child(row, answer[-1])
        engine.commit(sequence, path)
        steps += 1
    engine.close(sequence)
    return answer[: len(tokens) + n], steps


@pytest.mark.model
def test_answers_with_trees_are_the_greedy_ones(engine: Engine) -> None:
    cases = json.loads((DATA / "smollm2_greedy.json").read_text("utf-8"))["cases"]
    total = steps = 0
    for number, case in enumerate(cases):
        tokens = case["ids"]
        plain = greedy_answer(engine, tokens, 64)
        drafted, n = drafted_answer(engine, tokens, 64, 22)
        differing = [i for i, (a, b) in enumerate(zip(plain, drafted, strict=True)) if a != b]
        print(f"prompt {number}: {64 / n:.2f} tokens a step")
        assert not differing, f"prompt {number}: first at {differing[0] - len(tokens)} of the answer"
        total, steps = total + 64, steps + n
    print(f"all: {total / steps:.2f} tokens a step")
    assert total / steps > 2.5, "the draft guesses worse than it was trained to"


def synthetic(folder: Path, window: int) -> tuple[Path, Path]:
    """A target with features of 3 * 1024 numbers, and a draft with layers that have a window."""
    target = dataclasses.replace(
        PRESETS["tiny"], n_layer=4, n_embd=1024, n_ff=2816, n_head=8, n_head_kv=2, head_dim=128, n_vocab=4096
    )
    draft = dataclasses.replace(
        DRAFTS["tiny-draft"], n_layer=3, n_embd=1024, n_ff=2048, n_head=8, n_head_kv=2, head_dim=128,
        layers=(3, 0, 2), n_vocab=4096, window=window,
    )  # fmt: skip
    return (
        write_synthetic(folder / "target.gguf", target, 5),
        write_synthetic_draft(folder / "draft.gguf", draft, 6),
    )


@pytest.mark.parametrize(
    ("draft_ctx", "window", "limit"), [(64, 0, 0.25), (2048, 4096, 0.25), (2048, 256, 1.0)]
)
def test_windows_and_dropped_pages_beside_numpy(
    tmp_path: Path, draft_ctx: int, window: int, limit: float
) -> None:
    """The last window cuts contexts: at pages here, so that some rows see more than with NumPy."""
    target, draft = synthetic(tmp_path, window)
    with open_model(target) as file:
        host = Engine(file, NumpyBackend(), k_type="f16", v_type="f16", max_ctx=4096, draft=draft,
                      draft_ctx=draft_ctx)  # fmt: skip
    device = device_engine(target, draft, draft_ctx)
    tokens = np.random.default_rng(3).integers(10, 4000, 832).tolist()
    for n, piece in ((20, 2048), (128, 100), (832, 2048), (832, 192)):
        proposals = []
        for engine in (device, host):
            sequence = started(engine, tokens[:n], piece)
            proposals.append(propose(engine, [sequence], [tokens[n - 1]]))
            engine.close(sequence)
        what = f"{n} tokens in pieces of {piece}, context of {draft_ctx}, window of {window}"
        assert_near(*proposals, limit, what)


def test_a_draft_goes_and_comes_with_its_target(tmp_path: Path) -> None:
    engine = device_engine(*synthetic(tmp_path, 0))
    tokens = np.random.default_rng(4).integers(10, 4000, 300).tolist()
    sequence = started(engine, tokens)
    before = propose(engine, [sequence], [7])
    engine.park()
    parked = dict(engine.memory_report()["live"])
    engine.unpark()
    assert isinstance(engine.drafting._runner, CudaDraft)
    print(f"parked: {parked}, loaded again: {dict(engine.memory_report()['live'])}")
    assert_same(propose(engine, [sequence], [7]), before, "after park and unpark")

    # The draft alone: graphs that were captured without it leave no features.
    other = engine.fork(sequence)
    extended = []
    for one in (other, sequence):
        if one is sequence:
            assert engine.drafting.park()
            engine.forward(Rows.next_tokens([engine.fork(sequence)], [8]), Kind.STEP)
            assert engine.drafting.unpark()
        for token in (8, 9, 10):
            engine.forward(Rows.next_tokens([one], [token]), Kind.STEP).greedy()
            engine.commit(one, [0])
        extended.append(propose(engine, [one], [11]))
    assert_same(extended[1], extended[0], "after the draft alone went and came")
    engine.close(sequence)
    engine.trim()
