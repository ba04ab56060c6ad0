"""What a GGUF file is, how much memory it needs, and whether slotd can run it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from slotd.daemon.config import MAX_CTX_LIMIT, check_range
from slotd.daemon.memory import DeviceMemory
from slotd.daemon.weights.architectures import HyperParameters, left_out, read_hyper_parameters
from slotd.daemon.weights.kv_formats import check_kv_formats, check_kv_pair, kv_bytes_per_token
from slotd.daemon.weights.reader import GgufFile, check_model, open_gguf
from slotd.protocol.errors import ModelError


class Need(Protocol):
    """Bytes of the parts of memory; see `kv.numpy_need`."""

    @property
    def weights(self) -> int: ...
    @property
    def kv(self) -> int: ...
    @property
    def working(self) -> int: ...


#: Tells it for a context (tokens), a K type and a V type.
FindNeed = Callable[[GgufFile, HyperParameters, int, str, str], Need]


@dataclass(frozen=True, slots=True)
class TypeTotal:
    """All tensors of one element type.

    Attributes:
        type: its name, e.g. ``Q4_1``.
        tensors: how many.
        parameters: numbers in them.
        bytes: their size in the file.
    """

    type: str
    tensors: int
    parameters: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """What the model needs on the NumPy backend, in bytes, for one request.

    Attributes:
        context: tokens of context that it holds for.
        k_type: how keys are stored.
        v_type: how values are stored.
        kv_per_token: keys and values of all layers for one token.
        kv: the memory that is taken for those of `context` tokens.
        weights: all tensors that are computed with, as float32.
        state: recurrent state of one sequence; 0 when all layers have attention.
        working: at most, what a call needs beside.
        total: all four: with so much as `--memory-limit` the request is answered.
        available: what a daemon would have: the limit, or the memory of this machine.
    """

    context: int
    k_type: str
    v_type: str
    kv_per_token: int
    kv: int
    weights: int
    state: int
    working: int
    total: int
    available: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """The answer of `slotd inspect`.

    Attributes:
        path: the file, as it was named.
        name: ``general.name``, or empty.
        arch: ``general.architecture``, or empty.
        gguf_version: version of the container.
        file_bytes: length of the file.
        identity: hash of header and samples, as in HELLO.
        tensors: number of tensors.
        parameters: numbers in all tensors.
        types: totals per element type, largest in bytes first.
        runnable: whether slotd can run the model.
        reason: why not; empty when it can.
        left_out: tensors that are not computed with: blocks that guess further tokens.
        hyper: hyper-parameters; None when they cannot be read.
        memory: what it needs; None without `hyper`.
    """

    path: str
    name: str
    arch: str
    gguf_version: int
    file_bytes: int
    identity: str
    tensors: int
    parameters: int
    types: tuple[TypeTotal, ...]
    runnable: bool
    reason: str
    left_out: int
    hyper: HyperParameters | None
    memory: Memory | None

    def to_json(self) -> str:
        """One JSON object on one line, with the names of the attributes."""
        fields = dataclasses.asdict(self)
        if self.hyper is not None:
            fields["hyper"]["stop_ids"] = sorted(self.hyper.stop_ids)
            fields["hyper"]["fused_qkv"] = sorted(self.hyper.fused_qkv)
        return json.dumps(fields)

    def to_text(self) -> str:
        """Plain text, several lines."""
        return "\n".join([*_summary(self), "", *_type_table(self), "", *_verdict(self)])


def inspect_file(
    path: str | os.PathLike[str], need: FindNeed, *, ctx: int | None = None, k_type: str = "f32",
    v_type: str = "f32", memory_limit: int | None = None,
) -> Inspection:  # fmt: skip
    """Look at a file.

    Args:
        path: any GGUF file.
        need: tells how much memory it needs.
        ctx: context length for the memory figures, in tokens; default: the model's own.
        k_type: one of `KV_NAMES`.
        v_type: one of `KV_NAMES`.
        memory_limit: bytes that a daemon may have; default: the memory of this machine.

    Raises:
        ModelError: it is not a whole GGUF file. A whole one that cannot be run is not an error.
        ConfigError: what a daemon with these settings refuses too: ctx is out of range, or a K/V type is not
            supported or does not fit the model's heads.
    """
    if ctx is not None:
        check_range("--max-ctx", ctx, 2, MAX_CTX_LIMIT)
    with open_gguf(path) as file:
        hyper, reason = _judge(file)
        (check_kv_pair if hyper is None else partial(check_kv_formats, hyper))(k_type, v_type)
        unused = left_out(file.header, hyper) if hyper else frozenset()
        return Inspection(
            path=str(path),
            name=_text(file, "general.name"),
            arch=_text(file, "general.architecture"),
            gguf_version=file.header.version,
            file_bytes=file.file_bytes,
            identity=file.identity,
            tensors=len(file.header.tensors),
            parameters=file.n_parameters,
            types=_type_totals(file),
            runnable=not reason,
            reason=reason,
            left_out=len(unused),
            hyper=hyper,
            memory=_memory(file, need, hyper, ctx, k_type, v_type, memory_limit) if hyper else None,
        )


# ----- gathering


def _judge(file: GgufFile) -> tuple[HyperParameters | None, str]:
    """Hyper-parameters when they can be read, and the reason why the model cannot be run, or empty."""
    hyper = None
    try:
        hyper = read_hyper_parameters(file.header)
        check_model(file)
    except ModelError as error:
        return hyper, str(error).removeprefix(f"{file.path}: ")
    return hyper, ""


def _text(file: GgufFile, key: str) -> str:
    """A text of the file, without anything that a terminal would obey."""
    value = file.header.metadata.get(key, "")
    return "".join(c if c.isprintable() else "?" for c in value) if isinstance(value, str) else ""


def _type_totals(file: GgufFile) -> tuple[TypeTotal, ...]:
    names: dict[str, list[str]] = defaultdict(list)
    for name in file.header.tensors:
        names[file.block_type(name).name].append(name)
    totals = [
        TypeTotal(
            type=kind,
            tensors=len(members),
            parameters=sum(file.header.tensors[name].n_elements for name in members),
            bytes=sum(file.n_bytes(name) for name in members),
        )
        for kind, members in names.items()
    ]
    return tuple(sorted(totals, key=lambda total: (-total.bytes, total.type)))


def _memory(
    file: GgufFile, find: FindNeed, hyper: HyperParameters, ctx: int | None, k_type: str, v_type: str,
    memory_limit: int | None,
) -> Memory:  # fmt: skip
    context = hyper.n_ctx_train if ctx is None else ctx
    need = find(file, hyper, context, k_type, v_type)
    state = hyper.delta_net.state_bytes if hyper.delta_net else 0
    return Memory(
        context=context,
        k_type=k_type,
        v_type=v_type,
        kv_per_token=kv_bytes_per_token(hyper, k_type, v_type),
        kv=need.kv,
        weights=need.weights,
        state=state,
        working=need.working,
        total=need.weights + need.kv + state + need.working,
        available=DeviceMemory(memory_limit).total,
    )


# ----- text


def _summary(inspection: Inspection) -> Iterator[str]:
    yield inspection.path
    yield _line("name", inspection.name or "(none)")
    yield _line("architecture", f"{inspection.arch or '(none)'}, GGUF version {inspection.gguf_version}")
    yield _line("size", f"{inspection.parameters:,} parameters, {inspection.file_bytes:,} bytes")
    if hyper := inspection.hyper:
        yield _line("layers", f"{hyper.n_layer}, width {hyper.n_embd}, feed-forward {hyper.n_ff}")
        if net := hyper.delta_net:
            yield _line("recurrent", f"{len(net.layers)} layers (gated DeltaNet), the others have attention")
            heads = f"{net.n_value_heads} heads of {net.state_size}, {net.n_key_heads} for queries and keys"
            yield _line("", f"{heads}, convolution of {net.conv_kernel}")
        if hyper.n_nextn:
            what = f"{hyper.n_nextn} for further tokens (MTP), {inspection.left_out} tensors: not used"
            yield _line("blocks", what)
        heads = f"{hyper.n_head} heads of {hyper.head_dim}, {hyper.n_head_kv} for keys and values"
        yield _line("attention", heads)
        yield _line("rope", f"base {hyper.rope_base:g}, {hyper.rope_dims} of {hyper.head_dim} numbers turned")
        stop_ids = " ".join(map(str, sorted(hyper.stop_ids))) or "none"
        yield _line("vocabulary", f"{hyper.n_vocab} tokens, stop ids {stop_ids}")
        yield _line("context", f"{hyper.n_ctx_train} tokens")
    yield _line("identity", inspection.identity)


def _line(label: str, text: str) -> str:
    return f"  {label:<13} {text}"


def _type_table(inspection: Inspection) -> Iterator[str]:
    yield f"  {'type':<8} {'tensors':>8} {'parameters':>16} {'bytes':>16}"
    for total in inspection.types:
        yield f"  {total.type:<8} {total.tensors:>8} {total.parameters:>16,} {total.bytes:>16,}"


def _verdict(inspection: Inspection) -> Iterator[str]:
    if memory := inspection.memory:
        yield f"  memory for a request of {memory.context} tokens on the NumPy backend: {_mib(memory.total)}"
        yield f"    {'weights as float32':<20} {_mib(memory.weights)}"
        stored = f"K/V in {memory.k_type}/{memory.v_type}"
        yield f"    {stored:<20} {_mib(memory.kv)} ({memory.kv_per_token:,} bytes per token, taken in pieces)"
        if memory.state:
            yield f"    {'recurrent state':<20} {_mib(memory.state)} for each sequence and slot"
        yield f"    {'working memory':<20} {_mib(memory.working)} at most"
    if not inspection.runnable:
        yield f"  slotd cannot run it: {inspection.reason}"
        return
    yield "  slotd can run it"
    if memory and memory.total > memory.available:
        yield (
            f"  but not a request of {memory.context} tokens on the NumPy backend: there are "
            f"{_mib(memory.available)} of memory"
        )
    if (hyper := inspection.hyper) and memory and memory.context > hyper.n_ctx_train:
        yield f"  beyond the {hyper.n_ctx_train} positions that it was trained for answers may degrade"


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.1f} MiB"
