"""kernels/rope_store.cu: rotations and stored bytes, word for word as NumPy without fused products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slotd.daemon.kv.element_types import KV_TYPES
from slotd.daemon.ops.batch import TILE
from slotd.daemon.ops.cuda_attention import DeviceBatch, HeadNorms
from slotd.daemon.ops.cuda_attention_shape import KV_TYPE_NUMBERS
from slotd.daemon.ops.kv_blocks import stored_bytes, write_stored
from slotd.daemon.ops.rotation import rotate_unmetered
from tests.gpu.attention_rig import LAYER, Placed, Rig
from tests.gpu.test_attention import assert_close, assert_same_bits, make_call, make_rig

MAX_POSITIONS = 1024


def angle_table(dims: int) -> np.ndarray:
    """float32 [MAX_POSITIONS, dims / 2, 2]."""
    angles = np.arange(MAX_POSITIONS)[:, None] * 10000.0 ** (-np.arange(0, dims, 2) / dims)
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)


def rotated(x: np.ndarray, positions: np.ndarray, dims: int, style: str) -> np.ndarray:
    """x [n, heads, D] with each product rounded; sums of two rounded products."""
    cos, sin = (angle_table(dims)[positions][..., i][:, None] for i in (0, 1))
    y = x.copy()
    if style == "interleaved":
        a, b = x[..., 0:dims:2], x[..., 1:dims:2]
        y[..., 0:dims:2], y[..., 1:dims:2] = a * cos - b * sin, b * cos + a * sin
    else:
        a, b = x[..., : dims // 2], x[..., dims // 2 : dims]
        y[..., : dims // 2], y[..., dims // 2 : dims] = a * cos - b * sin, b * cos + a * sin
    return y


class Launch:
    """rope_store of the rows of some calls; what it left on the device."""

    def __init__(
        self, rig: Rig, placed: Placed, qkv: np.ndarray, dims: int, style: Any, **norms: Any
    ) -> None:
        device, shape = rig.device, rig.shape
        layout, batch, self._batch = placed.pack(step=True, bucket=8)
        padded = np.full((layout.rows, shape.qkv_width), 3.0, np.float32)
        padded[: len(qkv)] = qkv
        blocks = [device.upload(x) for x in (padded, angle_table(dims))]
        weights = {name: device.upload(x) for name, x in norms.items()}
        where = {name: device.address(block) for name, block in weights.items()}
        rig.attention.rope_store(
            LAYER,
            device.address(blocks[0]),
            DeviceBatch(layout, batch.address, layout.rows),
            device.address(blocks[1]),
            dims,
            style,
            HeadNorms(where["q"], where["k"], 1e-5) if where else None,
        )
        after = device.download(blocks[0], np.float32).reshape(padded.shape)
        assert (after[len(qkv) :] == 3.0).all(), "padding rows were changed"
        self.after = after[: len(qkv)]
        self.images = [device.download(block) for block in placed.blocks]


def stored_rows(rig: Rig, placed: Placed, image: list[np.ndarray], n: int) -> tuple[np.ndarray, np.ndarray]:
    """Stored bytes of the first sequence's last n places: [n, heads, bytes] of K and of V."""
    shape, sequence = rig.shape, placed.rows.sequences[0]
    k_rows, v_rows = [], []
    for place in range(len(sequence), len(sequence) + n):
        number, index = divmod(sequence.pages[place // TILE], 16)
        k_shape = (2, 16, shape.n_head_kv, TILE, shape.k_row_bytes)
        v_shape = (2, 16, shape.n_head_kv, TILE, shape.v_row_bytes)
        split = int(np.prod(k_shape))
        k_rows.append(image[number][:split].reshape(k_shape)[LAYER, index, :, place % TILE])
        v_rows.append(image[number][split:].reshape(v_shape)[LAYER, index, :, place % TILE])
    return np.stack(k_rows), np.stack(v_rows)


def expected_bytes(x: np.ndarray, name: str) -> np.ndarray:
    kind = KV_TYPES[name]
    stored = np.empty((*x.shape[:-1], kind.items(x.shape[-1])), kind.dtype)
    write_stored(x, stored)
    return stored_bytes(stored)


@pytest.mark.parametrize("kv_type", [name for name in KV_TYPE_NUMBERS if name != "tq3_0"])
@pytest.mark.parametrize(
    ("shape_name", "dims", "style"),
    [("smollm", 64, "interleaved"), ("23b", 128, "half"), ("23b", 48, "half"), ("0.8b", 64, "half")],
)
def test_rotation_and_stored_bytes(kv_type: str, shape_name: str, dims: int, style: str) -> None:
    other = {"q8_0": "q4_1", "q4_0": "q5_1"}.get(kv_type, kv_type)
    rig = make_rig(shape_name, kv_type, other)
    n, shape = 6, rig.shape
    placed = Placed(rig, [make_call(rig, 61, n, 1)])
    rng = np.random.default_rng(2)
    qkv = rng.standard_normal((n, shape.qkv_width)).astype(np.float32)
    qkv[1] *= 1e-6  # blocks whose scale is subnormal as float16
    qkv[2] = 0
    qkv[3, ::2] = -qkv[3, 1::2]  # magnitudes that occur twice
    qkv[4] = np.round(qkv[4] * 4) / 4
    n_qk = (shape.n_head + shape.n_head_kv) * shape.head_dim
    positions = 61 + np.arange(n)
    qk = rotated(qkv[:, :n_qk].reshape(n, -1, shape.head_dim), positions, dims, style)
    launch = Launch(rig, placed, qkv, dims, style)
    n_q = shape.n_head * shape.head_dim
    assert_same_bits(launch.after[:, :n_q].copy(), qk[:, : shape.n_head].reshape(n, -1), "q")
    assert_same_bits(launch.after[:, n_q:].copy(), qkv[:, n_q:].copy(), "k and v in the input")

    k, v = stored_rows(rig, placed, launch.images, n)
    assert (k == expected_bytes(qk[:, shape.n_head :], kv_type)).all(), "stored keys"
    assert (v == expected_bytes(qkv[:, n_qk:].reshape(n, shape.n_head_kv, -1), other)).all(), "stored values"
    before, after = np.concatenate(placed.images), np.concatenate(launch.images)
    most = n * shape.n_head_kv * (shape.k_row_bytes + shape.v_row_bytes)
    assert (before != after).sum() <= most, "other places were written"


@pytest.mark.parametrize("shape_name", ["23b", "0.8b"])
def test_rotated_type(shape_name: str) -> None:
    """Bytes of groups as NumPy writes them, and queries in the rotation of the keys."""
    rig = make_rig(shape_name, "tq3_0", "tq3_0")
    n, shape, rng = 7, rig.shape, np.random.default_rng(8)
    placed = Placed(rig, [make_call(rig, 61, n, 1)])
    qkv = rng.standard_normal((n, shape.qkv_width)).astype(np.float32)
    qkv[1] *= 1e-6
    qkv[2] = 0
    qkv[3, ::7] *= 50
    qkv[4] *= 1e3
    qkv[5] = np.sign(qkv[5])
    launch = Launch(rig, placed, qkv, 64, "half")
    keys, values = (shape.n_head + np.array([0, shape.n_head_kv])) * shape.head_dim
    qk = rotated(qkv[:, :values].reshape(n, -1, shape.head_dim), 61 + np.arange(n), 64, "half")
    turned = rotate_unmetered(np.ascontiguousarray(qk[:, : shape.n_head])).reshape(n, -1)
    assert_same_bits(launch.after[:, :keys].copy(), turned, "queries")
    k, v = stored_rows(rig, placed, launch.images, n)
    for got, x, what in ((k, qk[:, shape.n_head :], "keys"), (v, qkv[:, values:], "values")):
        differing = np.argwhere(got != expected_bytes(x.reshape(n, shape.n_head_kv, -1), "tq3_0"))
        assert not len(differing), f"{what}: {len(differing)} bytes differ, at {differing[:5].tolist()}"


@pytest.mark.parametrize("kv_type", ["f16", "bf16", "q8_0", "q4_0"])
def test_gated_heads_that_turn_in_part(kv_type: str) -> None:
    """256 numbers, of which 64 turn, with norms; the gates stay as they are."""
    rig = make_rig("0.8b", kv_type, kv_type)
    gated = Rig(replace(rig.shape, gated=True), rig.device)
    n, shape, rng = 5, gated.shape, np.random.default_rng(6)
    placed = Placed(gated, [make_call(gated, 61, n, 3)])
    qkv = rng.standard_normal((n, shape.qkv_width)).astype(np.float32)
    weights = {name: rng.uniform(0.5, 2, 256).astype(np.float32) for name in ("q", "k")}
    launch = Launch(gated, placed, qkv, 64, "half", **weights)
    n_q, keys_end = shape.n_head * 512, shape.n_head * 512 + shape.n_head_kv * 256
    _, v = stored_rows(gated, placed, launch.images, n)
    assert_same_bits(launch.after[:, n_q:].copy(), qkv[:, n_q:].copy(), "k and v in the input")
    before, after = (x[:, :n_q].reshape(n, shape.n_head, 2, 256) for x in (qkv, launch.after))
    assert_same_bits(after[:, :, 1].copy(), before[:, :, 1].copy(), "gates")
    # The same heads without gates give the same.
    plain = np.concatenate([before[:, :, 0].reshape(n, -1), qkv[:, n_q:]], axis=1)
    same = Launch(rig, Placed(rig, [make_call(rig, 61, n, 3)]), plain, 64, "half", **weights)
    assert_same_bits(after[:, :, 0].reshape(n, -1), same.after[:, : n_q // 2].copy(), "queries")
    assert all((a == b).all() for a, b in zip(launch.images, same.images, strict=True)), "stored"
    normed = (
        before[:, :, 0] / np.sqrt((before[:, :, 0] ** 2).mean(axis=-1, keepdims=True) + 1e-5) * weights["q"]
    )
    assert_close(after[:, :, 0], rotated(normed, 61 + np.arange(n), 64, "half"), 1e-5)
    assert (v == expected_bytes(qkv[:, keys_end:].reshape(n, shape.n_head_kv, -1), kv_type)).all()


def test_norms_of_heads() -> None:
    rig = make_rig("23b")
    n, shape = 3, rig.shape
    placed = Placed(rig, [make_call(rig, 5, n, 3)])
    rng = np.random.default_rng(4)
    qkv = rng.standard_normal((n, shape.qkv_width)).astype(np.float32)
    weights = {name: rng.uniform(0.5, 2, shape.head_dim).astype(np.float32) for name in ("q", "k")}
    launch = Launch(rig, placed, qkv, 128, "half", **weights)
    q = qkv[:, : shape.n_head * shape.head_dim].reshape(n, shape.n_head, -1)
    q = q / np.sqrt((q * q).mean(axis=-1, keepdims=True) + 1e-5) * weights["q"]
    expected = rotated(q, 5 + np.arange(n), 128, "half")
    assert_close(launch.after[:, : shape.n_head * shape.head_dim], expected.reshape(n, -1), 1e-5)


@pytest.mark.parametrize(("shape_name", "kv_type"), [("smollm", "f16"), ("23b", "f16"), ("23b", "q8_0")])
def test_context_of_all_layers_at_once(shape_name: str, kv_type: str) -> None:
    """Keys and values alone, both layers in a row: the bytes that each layer's own launch leaves."""
    rig = make_rig(shape_name, kv_type, kv_type)
    n, shape, device, rng = 6, rig.shape, rig.device, np.random.default_rng(5)
    n_q, width = shape.n_head * shape.head_dim, 2 * shape.n_head_kv * shape.head_dim
    kv = rng.standard_normal((8, 2, width)).astype(np.float32)
    norms = rng.uniform(0.5, 2, (2, shape.head_dim)).astype(np.float32)
    together, one_by_one = (Placed(rig, [make_call(rig, 61, n, 1)]) for _ in range(2))
    angles = device.upload(angle_table(shape.head_dim))
    layout, batch, _held = together.pack(step=True, bucket=8)
    blocks = [device.upload(x) for x in (kv, norms)]
    k_norm = HeadNorms(0, device.address(blocks[1]), 1e-5)
    rig.attention.store_context(
        device.address(blocks[0]), 2, DeviceBatch(layout, batch.address, 8), device.address(angles),
        shape.head_dim, "half", k_norm,
    )  # fmt: skip
    assert_same_bits(device.download(blocks[0], np.float32), kv.reshape(-1), "keys and values in the input")
    layout, batch, _held = one_by_one.pack(step=True, bucket=8)
    for layer in range(2):
        qkv = np.concatenate([np.ones((8, n_q), np.float32), kv[:, layer]], axis=1)
        held = [device.upload(x) for x in (qkv, norms[layer])]
        where = device.address(held[1])
        rig.attention.rope_store(
            layer, device.address(held[0]), DeviceBatch(layout, batch.address, 8), device.address(angles),
            shape.head_dim, "half", HeadNorms(where, where, 1e-5),
        )  # fmt: skip
    for segment, (a, b) in enumerate(zip(together.blocks, one_by_one.blocks, strict=True)):
        differing = np.flatnonzero(device.download(a) != device.download(b))
        assert not len(differing), f"segment {segment}: {len(differing)} bytes, from {differing[:5].tolist()}"
        assert (device.download(a) != together.images[segment]).any(), "nothing was stored"
