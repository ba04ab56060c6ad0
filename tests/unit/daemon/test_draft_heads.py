"""DFlash2 and DSpark: what they propose, against the same written down once more; files with parts of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotd.daemon.cuda_draft import check_draft
from slotd.daemon.engine import Engine
from slotd.daemon.models import dflash_heads
from slotd.daemon.numpy_backend import NumpyBackend, NumpyRunner
from slotd.daemon.rows import Kind, Rows
from slotd.daemon.weights.convert_draft import convert_draft
from slotd.daemon.weights.draft_file import open_draft, target_layers
from slotd.daemon.weights.reader import open_model
from slotd.protocol.errors import ModelError
from tests.fakes.dflash_formula import Formula, log_softmax
from tests.fakes.draft_checkpoint import write_checkpoint
from tests.fakes.tiny_draft import BLOCK, N_LAYER, draft_weights, matrix, write_tiny_draft

IDS = np.random.default_rng(6).integers(0, 320, 90).tolist()
E, V, RANK, KERNEL, GROUPS, TOP_K = 64, 320, 12, 2, 4, 10
TOKEN = 7

Weights = dict[str, np.ndarray]


def conv_weights() -> Weights:
    rng = np.random.default_rng(2)
    found: Weights = {}
    for i in range(N_LAYER):
        for part in ("attn", "ffn"):
            base = np.stack([np.ones((2, E)), np.zeros((2, E))], 1) + 0.3 * rng.standard_normal(
                (2, KERNEL, E)
            )
            found[f"blk.{i}.{part}_conv_base"] = base.astype(np.float32)
            found[f"blk.{i}.{part}_conv_proj.weight"] = matrix(rng, 2 * KERNEL * GROUPS, E, 0.3)
    return found


def selector_weights() -> Weights:
    rng = np.random.default_rng(3)
    return {
        "selector_predecessor.weight": matrix(rng, V, RANK, 3.0),
        "selector_successor.weight": matrix(rng, V, RANK, 3.0),
        "selector_hidden.weight": matrix(rng, RANK, E, 2.0),
    }


def markov_weights(rows: int = V) -> Weights:
    rng = np.random.default_rng(4)
    return {"markov_w1.weight": matrix(rng, V, RANK, 3.0), "markov_w2.weight": matrix(rng, rows, RANK, 3.0)}


def convolved(weights: Weights) -> Any:
    """The formula's `around`: each row with the one before it."""

    def around(layer: int, part: str, side: int, normed: np.ndarray, x: np.ndarray) -> np.ndarray:
        base = weights[f"blk.{layer}.{part}_conv_base"].astype(np.float64)
        moving = normed @ weights[f"blk.{layer}.{part}_conv_proj.weight"].T.astype(np.float64)
        moving = moving.reshape(len(x), 2, KERNEL, GROUPS)
        y = np.zeros_like(x)
        for row in range(len(x)):
            for channel in range(E):
                group = channel // (E // GROUPS)
                for tap in range(min(KERNEL, row + 1)):
                    weight = base[side, tap, channel] + moving[row, side, tap, group]
                    y[row, channel] += weight * x[row - tap, channel]
        return y

    return around


class Rig:
    """An engine with a draft of some heads, the features of IDS, and the formula without heads."""

    def __init__(
        self, target: Path, path: Path, tensors: Weights, dialect: str = "llama.cpp", **metadata: Any
    ) -> None:
        arch = "dflash." if dialect == "llama.cpp" else "qwen35-dflash-draft.dflash."
        keys = {arch + key: value for key, value in metadata.items()}
        write_tiny_draft(path, dialect=dialect, tensors=tensors, metadata=keys)
        with open_model(target) as file:
            self.embedding, self.head = (
                file.dequantise(name) for name in ("token_embd.weight", "output.weight")
            )
            self.engine = Engine(file, NumpyBackend(exact=True), draft=path)
        assert self.engine.drafts, self.engine.drafting.refusal
        self.text = self.engine.open()
        self.engine.forward(Rows.chain(self.text, IDS), Kind.PROMPT)
        runner = self.engine._loaded
        assert isinstance(runner, NumpyRunner)
        assert runner.features is not None
        self.features = runner.features.rows(np.arange(len(IDS))).copy()
        self.engine.commit(self.text, range(len(IDS)))

    def hidden(self, n: int = BLOCK, **fields: Any) -> np.ndarray:
        """[n, E] of the formula."""
        weights = draft_weights(E, 2, 11, lucebox=True)
        return Formula(weights, self.embedding, self.head, **fields).hidden(self.features, 0, TOKEN, n)

    def ask(self, depth: int = BLOCK - 1, width: int = 4) -> tuple[np.ndarray, np.ndarray]:
        found = self.engine.propose([self.text], [TOKEN], depth, width)
        assert found is not None
        return found.ids[0], found.logprobs[0]


def assert_best(
    found: tuple[np.ndarray, np.ndarray], logprobs: list[np.ndarray], tokens: list[np.ndarray]
) -> None:
    """Of each position the best, where logprobs[i] are of tokens[i]."""
    ids, values = found
    assert len(ids) == len(logprobs)
    for i, (row, of) in enumerate(zip(logprobs, tokens, strict=True)):
        best = np.argsort(-row)[: ids.shape[1]]
        assert ids[i].tolist() == of[best].tolist(), i
        np.testing.assert_allclose(values[i], row[best], rtol=0, atol=2e-4)


def test_convolutions(tiny_llama: Path, tmp_path: Path) -> None:
    weights = conv_weights()
    rig = Rig(tiny_llama, tmp_path / "draft.gguf", weights)
    hidden = rig.hidden(around=convolved(weights))
    logprobs = log_softmax(hidden[1:] @ rig.head.T.astype(np.float64))
    assert_best(rig.ask(), list(logprobs), [np.arange(V)] * (BLOCK - 1))
    plain = log_softmax(rig.hidden()[1:] @ rig.head.T.astype(np.float64))
    assert np.abs(plain - logprobs).max() > 0.1  # they matter


def test_blocks_side_by_side_are_not_mixed(tiny_llama: Path, tmp_path: Path) -> None:
    rig = Rig(tiny_llama, tmp_path / "draft.gguf", conv_weights() | selector_weights())
    other = rig.engine.fork(rig.text, 50)
    together = rig.engine.propose([rig.text, other], [TOKEN, 9], 5, 4)
    assert together is not None
    for i, (text, token) in enumerate([(rig.text, TOKEN), (other, 9)]):
        alone = rig.engine.propose([text], [token], 5, 4)
        assert alone is not None
        assert together.ids[i].tolist() == alone.ids[0].tolist()
        np.testing.assert_allclose(together.logprobs[i], alone.logprobs[0], rtol=0, atol=1e-5)


def test_the_path_selector(tiny_llama: Path, tmp_path: Path) -> None:
    table = selector_weights()
    rig = Rig(tiny_llama, tmp_path / "draft.gguf", conv_weights() | table, selector_top_k=TOP_K)
    hidden = rig.hidden(around=convolved(conv_weights()))[1:]
    alone = log_softmax(hidden @ rig.head.T.astype(np.float64))
    before, behind, turn = (value.astype(np.float64) for value in table.values())
    last, logprobs, tokens = TOKEN, [], []
    for i in range(BLOCK - 1):
        candidates = np.argsort(-alone[i])[:TOP_K]
        pairs = np.array([(before[last] * (turn @ hidden[i]) * behind[token]).sum() for token in candidates])
        scores = log_softmax(alone[i, candidates] + pairs)
        last = int(candidates[scores.argmax()])
        logprobs.append(scores)
        tokens.append(candidates)
    assert_best(rig.ask(), logprobs, tokens)
    wide, _ = rig.ask(width=TOP_K + 5)  # more than the selector was made for
    assert wide.shape == (BLOCK - 1, TOP_K + 5)


@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("dialect", ["llama.cpp", "lucebox"])
def test_markov(tiny_llama: Path, tmp_path: Path, from_anchor: bool, dialect: str) -> None:
    table = markov_weights()
    named = table
    if dialect == "lucebox":
        named = {f"dflash.dspark.markov.w{i + 1}": value for i, value in enumerate(table.values())}
    keys = {} if from_anchor else {"sample_from_anchor": False}
    rig = Rig(tiny_llama, tmp_path / "draft.gguf", named, dialect, **keys)
    depth = BLOCK if from_anchor else BLOCK - 1
    assert rig.engine.drafting.block_size == depth + 1
    hidden = rig.hidden()[BLOCK - depth :]
    before, behind = (value.astype(np.float64) for value in table.values())
    last, logprobs = TOKEN, []
    for i in range(depth):
        logprobs.append(log_softmax(hidden[i] @ rig.head.T + behind @ before[last]))
        last = int(logprobs[-1].argmax())
    assert_best(rig.ask(depth), logprobs, [np.arange(V)] * depth)


def test_markov_with_a_vocabulary_of_its_own(tiny_llama: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    ids, head, table = (
        np.sort(rng.choice(V, 100, replace=False)),
        matrix(rng, 100, E, 4.0),
        markov_weights(100),
    )
    own = {**table, "output.weight": head, "d2t": ids}
    rig = Rig(tiny_llama, tmp_path / "draft.gguf", own)
    before, behind = (value.astype(np.float64) for value in table.values())
    hidden, last, logprobs = rig.hidden(), TOKEN, []
    for i in range(BLOCK):
        logprobs.append(log_softmax(hidden[i] @ head.T + behind @ before[last]))
        last = int(ids[logprobs[-1].argmax()])
    assert_best(rig.ask(BLOCK), logprobs, [ids] * BLOCK)


def test_confidence_ends_a_draft(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = markov_weights()
    weights = matrix(np.random.default_rng(5), 1, E + RANK, 3.0)
    with_confidence = {**table, "conf_proj.weight": weights, "conf_proj.bias": np.full(1, 0.5, np.float32)}
    rig = Rig(tiny_llama, tmp_path / "draft.gguf", with_confidence)
    hidden, before = rig.hidden(), table["markov_w1.weight"]
    monkeypatch.setattr(dflash_heads, "LEAST_CONFIDENCE", 0.0)
    ids, _ = rig.ask(BLOCK)
    lasts = [TOKEN, *ids[:-1, 0]]
    says = [weights[0] @ np.concatenate([hidden[i], before[last]]) + 0.5 for i, last in enumerate(lasts)]
    sure = 1 / (1 + np.exp(-np.array(says)))
    for least in np.sort(sure)[[1, 3, 6]] + 1e-4:
        monkeypatch.setattr(dflash_heads, "LEAST_CONFIDENCE", least)
        doubts = np.flatnonzero(sure < least)
        assert len(rig.ask(BLOCK)[0]) == max(1, doubts[0])


@pytest.mark.parametrize(
    ("weights", "without", "reason"),
    [
        (conv_weights(), "blk.0.ffn_conv_proj.weight", "DFlash2 convolutions .* there is no ffn_conv_proj"),
        (conv_weights(), "blk.1.attn_conv_base", "tensor blk.1.attn_conv_base is missing"),
        (selector_weights(), "selector_successor.weight", "the DFlash2 path selector .* there is no behind"),
        (markov_weights(), "markov_w1.weight", "the DSpark head .* there is no before"),
    ],
)
def test_a_part_of_a_head_is_refused(tmp_path: Path, weights: Weights, without: str, reason: str) -> None:
    path = write_tiny_draft(tmp_path / "draft", dialect="llama.cpp", tensors={**weights, without: None})
    with pytest.raises(ModelError, match=reason):
        open_draft(path)


@pytest.mark.parametrize("kind", ["DFlash", "DFlash2", "DSpark"])
def test_what_the_converter_writes_is_read(kind: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "in", kind)
    convert_draft(tmp_path / "in", tmp_path / "out.gguf", "q8_0")
    with open_draft(tmp_path / "out.gguf") as file:
        heads = file.parameters.heads
        found = (heads.conv is not None, heads.selector is not None, heads.markov is not None)
        assert found == (kind == "DFlash2", kind == "DFlash2", kind == "DSpark")
        assert target_layers(file.parameters, 8) == (1, 3, 5)
        if kind == "DFlash":
            check_draft(file, 320)
        else:
            with pytest.raises(ModelError, match=f"the {kind} head of a draft is not supported on a CUDA"):
                check_draft(file, 320)
