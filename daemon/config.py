"""What a daemon process is started with, checked.

A flag beats its environment variable, which beats the default. A wrong value is a `ConfigError` that
names the flag and what is allowed; nothing is ever ignored in silence: what this version cannot do is
collected as `Inactive` and reported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slotd.protocol.errors import ConfigError

#: Largest context that is taken: positions are int32 and K/V of more would fit no machine.
MAX_CTX_LIMIT = 1 << 24

#: Largest number of slots, as in the source.
MAX_SLOTS = 64

#: What keeps freed blocks of device memory (`--pool`).
POOLS = ("legacy", "vmm")

#: What may host the engine side.
ENGINE_HOSTS = ("thread", "process")

#: What is there when a GPU may be.
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")

#: How a CUDA device multiplies weights (`--math`).
MATH = ("exact", "q8", "fast")

#: What is guessed ahead (`--spec`).
SPEC = ("auto", "off", "chain", "tree", "ngram")

OOM_POLICIES = ("ladder", "seed")

#: Largest trim interval, in tokens.
MAX_TRIM_TOKENS = 1 << 30

DEFAULT_CHECKPOINT_EVERY = 4096

#: Names of the source for the trim interval, the one that wins last. A wrong value there switches it off.
TRIM_VARIABLES = ("DFLASH_PREFILL_POOL_TRIM_TOKENS", "LUCE_PREFILL_POOL_TRIM_TOKENS")

#: Longest time of `--idle-unload`, in seconds: a week.
MAX_IDLE = 604_800

KIB_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, slots=True)
class Inactive:
    """Something the command line asked for that this version does not do."""

    name: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}{'=' + self.value if self.value else ''} ({self.reason})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of one daemon.

    Attributes:
        model: path of the target GGUF.
        max_ctx: positions per sequence; None = the model's own length.
        chunk: longest prefill piece, tokens; None = what suits the device.
        parallel: most requests that run at once.
        slots: snapshot slots.
        k_type, v_type: K/V cache types; None = what suits the device.
        device: auto (a CUDA device if there is one), cpu, or the number of a CUDA device.
        pool: what keeps freed device memory: legacy or vmm.
        exact: a row's bits do not depend on its neighbours.
        math: how a CUDA device multiplies weights: exact, q8 or fast; None = exact there.
        memory_limit: bytes of device memory, None = no limit.
        stream_fd: descriptor of the token stream, "-" = lines on stdout, None = none.
        max_line: longest command line, bytes.
        max_stall: longest gap that a prefill piece should put into another answer, seconds.
        stall_timeout: seconds a reader may be behind before its request is cancelled.
        slot_dir: folder of stored snapshots, None = there is none.
        slot_bytes: most bytes in it, None = no limit.
        oom_policy: what running out of memory may cost: ladder or seed (see `memory.pressure`).
        host_cache: bytes of the host tier of slots; None = a quarter of the available memory, 0 = off.
        trim_tokens: give cached pool blocks back each time a prompt has computed so many tokens; 0 = never.
        checkpoint_every: tokens between two kept states of a request, see `recurrence`; 0 = none is kept.
        state_dir: folder of the state file as it was given, see `state_file.choose_folder`.
        engine: what hosts the engine side: thread or process.
        engine_timeout: seconds without a sign of life after which an engine process is replaced.
        idle_unload: seconds without use after which the weights are unloaded; None = never.
        draft: path of the draft model, "none" = without one, None = the one that belongs to the target.
        spec: what is guessed ahead: auto, off, chain, tree or ngram (see `draft_choice`).
        budget: most guessed tokens of a step and request.
        draft_block: rows that the draft is given, None = what it was made for.
        draft_ctx: positions that the draft sees, at least.
        tree_temperature: the draft's logits are divided by it before a tree is built.
        chain_seed: trees begin with the best candidate of every position.
        inactive: what was asked for and is not there.
    """

    model: Path
    max_ctx: int | None = None
    chunk: int | None = None
    parallel: int = 4
    slots: int = 8
    k_type: str | None = None
    v_type: str | None = None
    device: str = "auto"
    pool: str = "legacy"
    exact: bool = False
    math: str | None = None
    memory_limit: int | None = None
    stream_fd: int | str | None = None
    max_line: int = 16 << 20
    max_stall: float = 0.06
    stall_timeout: float = 60.0
    slot_dir: Path | None = None
    slot_bytes: int | None = None
    oom_policy: str = "ladder"
    host_cache: int | None = None
    trim_tokens: int = 0
    checkpoint_every: int = DEFAULT_CHECKPOINT_EVERY
    state_dir: str | None = None
    engine: str = "thread"
    engine_timeout: float = 60.0
    idle_unload: float | None = None
    draft: str | None = None
    spec: str = "auto"
    budget: int = 22
    draft_block: int | None = None
    draft_ctx: int = 2048
    tree_temperature: float = 1.0
    chain_seed: bool = False
    inactive: tuple[Inactive, ...] = ()

    def __post_init__(self) -> None:
        if self.max_ctx is not None:
            check_range("--max-ctx", self.max_ctx, 2, MAX_CTX_LIMIT)
        if self.chunk is not None:
            check_range("--chunk", self.chunk, 1, 1 << 20)
        if not re.fullmatch(r"auto|cpu|\d{1,4}", self.device, re.ASCII):
            raise ConfigError(f"--device {self.device[:40]!r}: must be auto, cpu or the number of a device")
        if self.pool not in POOLS:
            raise ConfigError(f"--pool {self.pool[:40]!r}: must be {' or '.join(POOLS)}")
        if self.math is not None and self.math not in MATH:
            raise ConfigError(f"--math {self.math[:40]!r}: must be {', '.join(MATH[:-1])} or {MATH[-1]}")
        if self.exact and self.math not in (None, "exact"):
            raise ConfigError(f"--exact and --math {self.math} contradict each other")
        check_range("--parallel", self.parallel, 1, 64)
        check_range("--slots", self.slots, 1, MAX_SLOTS)
        check_range("--prefill-pool-trim-tokens", self.trim_tokens, 0, MAX_TRIM_TOKENS)
        check_range("--checkpoint-every", self.checkpoint_every, 0, MAX_CTX_LIMIT)
        if self.oom_policy not in OOM_POLICIES:
            raise ConfigError(f"--oom-policy {self.oom_policy!r}: must be {' or '.join(OOM_POLICIES)}")
        if self.engine not in ENGINE_HOSTS:
            raise ConfigError(f"--engine {self.engine!r}: must be {' or '.join(ENGINE_HOSTS)}")
        if not 0.1 <= self.engine_timeout <= 86400:
            raise ConfigError(f"--engine-timeout {self.engine_timeout:g} s: must be 0.1 to 86400")
        if self.idle_unload is not None and not 0 < self.idle_unload <= MAX_IDLE:
            raise ConfigError(f"--idle-unload {self.idle_unload:g} s: must be over 0 and at most {MAX_IDLE}")
        self._check_drafts()
        check_range("--max-line", self.max_line, 64, 1 << 30)
        if self.slot_bytes is not None and self.slot_dir is None:
            raise ConfigError("--slot-bytes limits --slot-dir (or --cache-dir), which is not given")
        if not 0 < self.max_stall <= 60:
            raise ConfigError(f"--max-stall {1000 * self.max_stall:g} ms: must be over 0 and at most 60000")
        if not 0 < self.stall_timeout <= 86400:
            raise ConfigError(f"--stall-timeout {self.stall_timeout:g} s: must be over 0 and at most 86400")

    def _check_drafts(self) -> None:
        if self.spec not in SPEC:
            raise ConfigError(f"--spec {self.spec[:40]!r}: must be {', '.join(SPEC[:-1])} or {SPEC[-1]}")
        check_range("--budget", self.budget, 1, 1024)
        if self.draft_block is not None:
            check_range("--draft-block", self.draft_block, 2, 64)
        check_range("--draft-ctx", self.draft_ctx, 1, MAX_CTX_LIMIT)
        if not 0 <= self.tree_temperature <= 100:
            raise ConfigError(f"--ddtree-temp {self.tree_temperature:g}: must be 0 to 100")


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raise ConfigError unless low <= value <= high."""
    if not low <= value <= high:
        raise ConfigError(f"{name} {value}: must be {low} to {high}")


def default_engine(device: str) -> str:
    """What hosts the engine side when nobody says: a process where a GPU computes, which may be lost."""
    gpu = any(Path(driver).exists() for driver in GPU_DRIVERS) if device == "auto" else device != "cpu"
    return "process" if gpu else "thread"


def split_arguments(
    arguments: tuple[str, ...], as_daemon: bool
) -> tuple[str | None, str | None, tuple[str, int, str] | None]:
    """(target, draft, one-shot (prompt, n, out) or None) from the positional words of the source's form.

    Raises:
        ConfigError: a number of words that means nothing.
    """
    if len(arguments) == 5:
        if as_daemon:
            raise ConfigError("--daemon takes TARGET and DRAFT only, not a one-shot prompt")
        prompt, n_gen, out = arguments[2:]
        if not re.fullmatch(r"\d{1,10}", n_gen, re.ASCII) or int(n_gen) > 2**31 - 1:
            raise ConfigError(f"N {n_gen[:40]!r}: must be a number of tokens, 0 to {2**31 - 1}")
        return arguments[0], arguments[1], (prompt, int(n_gen), out)
    if len(arguments) > 2:
        raise ConfigError(
            f"{len(arguments)} arguments: give TARGET [DRAFT], or TARGET DRAFT PROMPT.bin N OUT.bin"
        )
    padded = (*arguments, None, None)
    return padded[0], padded[1], None


def device_for(backend: str, device: str) -> str:
    """The device that `--device` and `--backend` mean together.

    Raises:
        ConfigError: an unknown backend, or one that the device does not belong to.
    """
    if backend not in ("auto", "cuda", "numpy"):
        raise ConfigError(f"--backend {backend[:40]!r}: must be auto, cuda or numpy")
    if (backend == "numpy" and device not in ("auto", "cpu")) or (backend == "cuda" and device == "cpu"):
        raise ConfigError(f"--backend {backend} does not compute on --device {device}")
    if device != "auto":
        return device
    return {"auto": "auto", "cuda": "0", "numpy": "cpu"}[backend]


def parse_size(name: str, text: str) -> int:
    """Bytes from "24GiB", "512M", "1.5g" or a plain number (1024-based in every spelling).

    Raises:
        ConfigError: not a size, or not above zero.
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    size = int(float(match[1]) * 1024 ** KIB_POWERS[match[2]]) if match is not None else 0
    if size < 1:
        raise ConfigError(f"{name} {text[:40]!r}: must be a size, like 24GiB, 512M or 1000000")
    return size


def parse_host_cache(text: str | None) -> int | None:
    """Bytes of the host tier; None: not said; "0": off.

    Raises:
        ConfigError: not a size.
    """
    if text is None:
        return None
    return 0 if text.strip() == "0" else parse_size("--host-cache", text)


def source_trim_tokens(environment: Mapping[str, str]) -> tuple[int, str | None]:
    """The trim interval of the source's variables, and a warning when the one that counts is wrong."""
    for name in reversed(TRIM_VARIABLES):
        text = environment.get(name, "").strip()
        if text:
            if text.isascii() and text.isdecimal() and int(text) <= MAX_TRIM_TOKENS:
                return int(text), None
            return 0, f"{name}={text!r} is not 0 to {MAX_TRIM_TOKENS}: no pool trim in long prefills"
    return 0, None


def parse_stream_fd(text: str) -> int | str:
    """A descriptor number, or "-" for lines on stdout.

    Raises:
        ConfigError: anything else, or a standard descriptor.
    """
    if text == "-":
        return text
    if not re.fullmatch(r"\d{1,10}", text, re.ASCII) or not 3 <= int(text) < 1 << 31:
        raise ConfigError(f"--stream-fd {text[:40]!r}: must be an inherited descriptor of at least 3, or -")
    return int(text)
