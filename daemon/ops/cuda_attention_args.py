"""Arguments of the attention kernels, field by field as their C++ structs."""

from __future__ import annotations

import ctypes


class Heads(ctypes.Structure):
    """Queries, results and stored K/V of a layer."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("q", "out", "page_k", "page_v", "k_layer", "v_layer")),
        *(
            (name, ctypes.c_int32)
            for name in ("q_stride", "q_head", "n_head", "n_head_kv", "k_type", "v_type")
        ),
        ("factor", ctypes.c_float),
    )


_STEP_ARRAYS = ("entries", "n_entries", "ancestors", "positions", "first_part", "split_parts", "first_single")


class Step(ctypes.Structure):
    """Of step attention."""

    _fields_ = (
        ("heads", Heads),
        *((name, ctypes.c_uint64) for name in _STEP_ARRAYS),
        *((name, ctypes.c_uint64) for name in ("part_sums", "part_weights")),
        ("n_stages", ctypes.c_int32),
    )


class Prompt(ctypes.Structure):
    """Of prompt attention."""

    _fields_ = (("heads", Heads), ("blocks", ctypes.c_uint64))


class Rotation(ctypes.Structure):
    """Of `rotation_back`."""

    _fields_ = (("x", ctypes.c_uint64), ("positions", ctypes.c_uint64), ("n_groups", ctypes.c_int32))


class Plain(ctypes.Structure):
    """Of attention in float32."""

    _fields_ = (
        ("heads", Heads),
        *(
            (name, ctypes.c_uint64)
            for name in ("positions", "sequence", "first_page", "committed", "ancestors")
        ),
        *((name, ctypes.c_int32) for name in ("head_dim", "value_dim")),
    )


_ROPE_POINTERS = (
    "qkv",
    "positions",
    "write_k",
    "write_v",
    "angles",
    "q_norm",
    "k_norm",
    "k_layer",
    "v_layer",
    "k_step",
    "v_step",
)
_ROPE_NUMBERS = (
    "stride",
    "width",
    "q_head",
    "n_head",
    "n_head_kv",
    "head_dim",
    "value_dim",
    "dims",
    "pairs",
    "k_type",
    "v_type",
)


class RopeStore(ctypes.Structure):
    """Of `rope_store`."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in _ROPE_POINTERS),
        *((name, ctypes.c_int32) for name in _ROPE_NUMBERS),
        ("eps", ctypes.c_float),
    )
