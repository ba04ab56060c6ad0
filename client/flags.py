"""The flags that several commands share, as data: names, help, and what they become.

Names and meanings are llama.cpp's where it has the flag. `cli` makes options of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slotd.client.params import DEFAULTS, INT31, PREFIX_SLOTS, ParamDict, check_all
from slotd.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Flag:
    """One option. `kind` is int, float or str; with `switch` it takes no value; `many`: repeatable.

    `positive`: a whole number from 1 on.
    """

    names: Sequence[str]
    help: str
    kind: type = str
    metavar: str | None = None
    default: Any = None
    positive: bool = False
    switch: bool = False
    many: bool = False


#: What -ctk and -ctv take.
KV_TYPES = "f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0 or tq3_0"

MODEL_FLAGS = (
    Flag(("-m", "--model"), "GGUF file. Default: SLOTD_MODEL, else a small one.", metavar="FILE"),
    Flag(("--pre",), "Pre-tokenizer, in place of the one that the model names.", metavar="NAME"),
    Flag(("-c", "--max-ctx"), "Context in tokens. Default: the model's own.", int, "N", positive=True),
    Flag(("--chunk",), "Longest prefill piece, in tokens.", int, "N", positive=True),
    Flag(("-ctk", "--cache-type-k"), f"Type of cached keys: {KV_TYPES}.", metavar="TYPE"),
    Flag(("-ctv", "--cache-type-v"), f"Type of cached values: {KV_TYPES}.", metavar="TYPE"),
    Flag(("--parallel",), "Most requests that run at once.", int, "N", positive=True),
    Flag(("--exact",), "The bits of an answer do not depend on what runs beside it. Slower.", switch=True),
    Flag(("--math",), "How a GPU multiplies weights: exact (the default), q8 or fast.", metavar="MODE"),
    Flag(("--slots",), "Snapshot slots. Default: 8, or --prefix-slots.", int, "N", positive=True),
    Flag(("--device",), "cpu, the number of a CUDA device, or auto.", metavar="DEVICE"),
    Flag(("--memory-limit",), "Most device memory, e.g. 4GiB.", metavar="SIZE"),
    Flag(
        ("--oom-policy",), "What running out of memory costs: ladder (as little as can be) or seed.",
        metavar="POLICY",
    ),
    Flag(("--host-cache",), "Host memory for slots that had to leave the device; 0 is none.", metavar="SIZE"),
    Flag(
        ("--prefill-pool-trim-tokens",),
        "In a long prompt, release cached memory blocks every N tokens; 0 is never. Each trim waits for the "
        "device and costs time: below some thousand tokens too much.", int, "N",
    ),
    Flag(("--draft",), "GGUF of a DFlash draft model; none is without one.", metavar="FILE"),
    Flag(
        ("--spec",), "What is guessed ahead and then verified, which changes no answer: auto (the default), "
        "chain, tree, ngram or off.", metavar="MODE",
    ),
    Flag(("--budget",), "Most tokens that are guessed for a step of an answer.", int, "N", positive=True),
    Flag(
        ("--idle-unload",), "Unload the weights after so many seconds without a request; the next one waits "
        "until they are loaded again. Default: never.", float, "S",
    ),
)  # fmt: skip

#: For commands that keep prefixes of prompts; see `cli`.
CACHE_FLAGS = (
    Flag(
        ("--cache-dir",),
        "Keep prefixes for later runs: ids in DIR/ids, what was computed in DIR/slots or SLOTD_SLOT_DIR.",
        metavar="DIR",
    ),
    Flag(("--slot-bytes",), "Most bytes on disk of what the daemon computed; the oldest go.", metavar="SIZE"),
)  # fmt: skip

SAMPLING_FLAGS = (
    Flag(("-n", "--max-tokens"), "Tokens to generate at most; -1: until the context is full.", int, "N", -1),
    Flag(("--temp",), "Temperature; 0 always takes the best token.", float, "T", DEFAULTS["temperature"]),
    Flag(("--top-k",), "Keep the K best tokens; 0 is off.", int, "K", DEFAULTS["top_k"]),
    Flag(("--top-p",), "Keep the best tokens up to probability P; 1 is off.", float, "P", DEFAULTS["top_p"]),
    Flag(("--min-p",), "Drop tokens below P times the best one; 0 is off.", float, "P", DEFAULTS["min_p"]),
    Flag(("--repeat-penalty",), "Repetition penalty; 1 is off.", float, "X", DEFAULTS["repetition_penalty"]),
    Flag(
        ("--repeat-last-n",), "Last tokens that the penalties look at; -1 is all.",
        int, "N", DEFAULTS["penalty_window"],
    ),
    Flag(("--frequency-penalty",), "Penalty for each time a token occurred.", float, "X", 0.0),
    Flag(("--presence-penalty",), "Penalty for a token that occurred.", float, "X", 0.0),
    Flag(("-s", "--seed"), "Seed; -1: a new one each time.", int, "N", -1),
    Flag(("--logit-bias",), "Add BIAS to the logit of token ID. Repeatable.", metavar="ID:BIAS", many=True),
    Flag(("--stop",), "End the answer before this text. Repeatable.", metavar="TEXT", many=True),
)  # fmt: skip


#: For commands that answer chats.
REASONING_FLAGS = (
    Flag(
        ("--think/--no-think",), "Whether the model reasons first. Default: as its chat template has it.",
        switch=True,
    ),
    Flag(
        ("--thinking-budget",), "Tokens after which a thought that is still open is closed; -1 is no limit.",
        int, "N", -1,
    ),
    Flag(
        ("--show-reasoning/--hide-reasoning",),
        "Whether the thought is shown, on stderr. Default: in JSON only, as `reasoning`.", switch=True,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """The daemon's own flags, as they were given; None and False leave the daemon's default."""

    max_ctx: int | None = None
    chunk: int | None = None
    cache_type_k: str | None = None
    cache_type_v: str | None = None
    parallel: int | None = None
    exact: bool = False
    math: str | None = None
    slots: int | None = None
    memory_limit: str | None = None
    oom_policy: str | None = None
    host_cache: str | None = None
    prefill_pool_trim_tokens: int | None = None
    slot_dir: str | None = None
    slot_bytes: str | None = None
    device: str | None = None
    idle_unload: float | None = None
    draft: str | None = None
    spec: str | None = None
    budget: int | None = None

    def argv(self) -> list[str]:
        """Arguments for ``slotd daemon``."""
        return self.deciding() + self._sizing()

    def deciding(self) -> list[str]:
        """The arguments that can change the text of an answer."""
        argv = [] if self.max_ctx is None else [f"--max-ctx={self.max_ctx}"]
        argv += [] if self.cache_type_k is None else ["-ctk", self.cache_type_k]
        argv += [] if self.cache_type_v is None else ["-ctv", self.cache_type_v]
        argv += [] if self.device is None else [f"--device={self.device}"]
        argv += [] if self.math is None else [f"--math={self.math}"]
        return argv + (["--exact"] if self.exact else [])

    def _sizing(self) -> list[str]:
        names = (
            *("chunk", "parallel", "slots", "memory_limit", "oom_policy", "host_cache"),
            *("prefill_pool_trim_tokens", "slot_dir", "slot_bytes", "idle_unload"),
            *("draft", "spec", "budget"),
        )
        given = {name: getattr(self, name) for name in names}
        return [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]


def engine_args(given: Mapping[str, Any]) -> EngineArgs:
    """The daemon's flags among the options of a command."""
    return EngineArgs(**{name: given[name] for name in EngineArgs.__dataclass_fields__ if name in given})


def with_caches(
    engine: EngineArgs, prefix_slots: int, cache_dir: str | None, environment: Mapping[str, str]
) -> EngineArgs:
    """`engine` with what the client's caches need of the daemon, where nobody has said otherwise.

    That is as many slots, and a folder for snapshots beside that of the ids.
    """
    if engine.slots is None and prefix_slots > PREFIX_SLOTS and not environment.get("SLOTD_SLOTS"):
        engine = replace(engine, slots=prefix_slots)
    if cache_dir is not None and not environment.get("SLOTD_SLOT_DIR"):
        engine = replace(engine, slot_dir=str(Path(cache_dir) / "slots"))
    return engine


def sampling_params(given: Mapping[str, Any]) -> ParamDict:
    """The sampling flags among the options of a command, checked. ConfigError names what is wrong."""
    window = given["repeat_last_n"]
    params: ParamDict = {
        "max_tokens": None if given["max_tokens"] == -1 else given["max_tokens"],
        "temperature": given["temp"],
        "top_k": given["top_k"],
        "top_p": given["top_p"],
        "min_p": given["min_p"],
        "repetition_penalty": given["repeat_penalty"],
        "penalty_window": INT31 if window == -1 else window,
        "frequency_penalty": given["frequency_penalty"],
        "presence_penalty": given["presence_penalty"],
        "seed": None if given["seed"] == -1 else given["seed"],
    }
    if given["logit_bias"]:
        params["logit_bias"] = _parse_biases(given["logit_bias"])
    if given["stop"]:
        params["stop"] = list(given["stop"])
    if given.get("think") is not None:
        params["think"] = given["think"]
    if given.get("thinking_budget", -1) != -1:
        params["thinking_budget"] = given["thinking_budget"]
    return check_all(params, typed=True)


def _parse_biases(texts: Sequence[str]) -> dict[str, float]:
    biases: dict[str, float] = {}
    for text in texts:
        token, _, bias = text.rpartition(":")
        try:
            value = float(bias)
        except ValueError:
            value = float("nan")
        if not token or value != value or token in biases:
            raise ConfigError(f"--logit-bias {text}: it is written ID:BIAS, as in 42:-5, once for each id")
        biases[token] = value
    return biases
