"""Memory that a model needs on the NumPy backend, from the file alone: as the pool will count it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from slotd.daemon.kv.pages import PAGE, SEGMENT_PAGES, pages_for
from slotd.daemon.memory.pool import size_class
from slotd.daemon.ops.numpy_attention import SCORE_BYTES
from slotd.daemon.weights.architectures import HyperParameters, left_out
from slotd.daemon.weights.kv_formats import kv_bytes_per_token
from slotd.daemon.weights.reader import GgufFile

FLOAT32_BYTES = 4

#: Tensors that lie in one array: parts of their names, and the name that they have together.
JOINED = {
    "attn_q": "attn_qkv", "attn_k": "attn_qkv", "attn_v": "attn_qkv",
    # Of a recurrent layer, which has no other attn_qkv.
    "attn_gate": "attn_qkv", "ssm_beta": "attn_qkv", "ssm_alpha": "attn_qkv",
    "ffn_gate": "ffn_gate_up", "ffn_up": "ffn_gate_up",
}  # fmt: skip

#: Longest prompt piece by default, in rows.
CHUNK = 128


@dataclass(frozen=True, slots=True)
class NumpyNeed:
    """Bytes of the pool.

    Attributes:
        weights: all tensors as float32.
        kv: K/V of one request that fills the context.
        working: at most, for the arrays of a call. Rows that others add to a step are not in it.
    """

    weights: int
    kv: int
    working: int


def numpy_need(file: GgufFile, hyper: HyperParameters, context: int, k_type: str, v_type: str) -> NumpyNeed:
    """What a model needs when nothing but one request of `context` tokens is there.

    k_type, v_type: names that fit the heads of the model.
    """
    segment = SEGMENT_PAGES * PAGE * kv_bytes_per_token(hyper, k_type, v_type)
    # A page more than the tokens take is reserved for every request.
    n_segments = -(-pages_for(context + PAGE) // SEGMENT_PAGES)
    return NumpyNeed(
        weights=sum(size_class(FLOAT32_BYTES * n) for n in _arrays(file, hyper)),
        kv=n_segments * size_class(segment),
        working=_working(hyper, context),
    )


def _arrays(file: GgufFile, hyper: HyperParameters) -> Iterator[int]:
    """Numbers in each array of the loaded model."""
    together: defaultdict[str, int] = defaultdict(int)
    unused = left_out(file.header, hyper) | {"rope_freqs.weight"}
    for name, info in file.header.tensors.items():
        if name in unused:
            continue
        parts = name.split(".")
        together[".".join(JOINED.get(part, part) for part in parts)] += info.n_elements
    yield from together.values()


def _working(h: HyperParameters, context: int) -> int:
    """A bound for the arrays of a prompt piece, and for what the pool keeps of them for the next layer."""
    n = min(CHUNK, context)
    q, o = h.n_head * h.head_dim, h.n_head * h.value_dim
    kv = h.n_head_kv * (h.head_dim + h.value_dim)
    rows = n * (3 * h.n_embd + 3 * q + 2 * o + kv + 3 * h.n_ff) * FLOAT32_BYTES
    states = 0
    if net := h.delta_net:
        rows += n * (net.channels + 4 * net.value_width + 2 * net.n_value_heads) * FLOAT32_BYTES
        # A prompt computes the next state beside the sequence's own, which is counted apart.
        states = (
            2 * size_class(net.state_bytes) - net.state_bytes + size_class(net.state_bytes // len(net.layers))
        )
    scores = min(SCORE_BYTES, min(n, PAGE) * h.n_head * (context + 2 * PAGE) * FLOAT32_BYTES)
    products = scores * h.value_dim // PAGE
    converted = SEGMENT_PAGES * PAGE * kv * FLOAT32_BYTES
    rope = 3 * (context + 1024) * h.rope_dims // 2 * 2 * FLOAT32_BYTES
    logits = 2 * h.n_vocab * FLOAT32_BYTES
    # A block of the pool is up to an eighth larger, and blocks of two lengths of context stay for a while.
    return (rows + 2 * (scores + products) + converted + rope + logits) * 9 // 8 + states
