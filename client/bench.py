"""``slotd bench``: rates of prefill and decode, against what the memory allows.

Prompts are random token ids from a fixed seed, another one for every run, so that nothing is reused.
Prefill rates and compute times are the daemon's own; times to the first token and between tokens are taken
here, where the tokens arrive. The floor of a decode step is the time to read every weight once: weight bytes
/ measured memory bandwidth. The weights count as the daemon holds them, so with an embedding table of its
own, of which a step reads one row, the floor is a little too high.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slotd.client.bandwidth import Bandwidth, measure
from slotd.client.rates import rates
from slotd.protocol.errors import ConfigError

if TYPE_CHECKING:
    from slotd.client.client import Client
    from slotd.client.completion import Completion

#: Time stages of the daemon in which a token is computed; the rest of a step is overhead.
COMPUTE_STAGES = ("decode_s", "draft_s", "verify_s", "sample_s")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: prompt sizes, depths to decode at, tokens to decode, runs of each."""

    prefill: tuple[int, ...]
    depths: tuple[int, ...]
    decode: int
    repeats: int


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """Medians over the runs, and the slowest and fastest rate. `ttft_s`: from the call to the first token."""

    tokens: int
    tokens_per_s: float
    tokens_per_s_min: float
    tokens_per_s_max: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """Medians over the runs, and the slowest and fastest rate.

    `token_s`: between tokens as they arrive; `overhead_s`: of it, not computing.
    """

    depth: int
    tokens_per_s: float
    tokens_per_s_min: float
    tokens_per_s_max: float
    token_s: float
    overhead_s: float


@dataclass(frozen=True, slots=True)
class Floor:
    """What a decode step at least takes, and how near the best measured depth comes (1 = at the floor)."""

    weight_bytes: int
    bandwidth_bytes_per_s: float
    bandwidth_threads: int
    token_s: float
    reached: float


@dataclass(frozen=True, slots=True)
class _Timed:
    answer: Completion
    ttft_s: float
    token_s: float  # mean gap between tokens


def parse_sizes(flag: str, text: str) -> tuple[int, ...]:
    """``128,256`` as numbers. ConfigError names the flag."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"{flag} {text}: it is a list of token counts such as 128,256")
    return sizes


def run(path: Path, open_client: Callable[[], Client], plan: Plan, *, as_json: bool) -> int:
    """Measure and print. Returns the exit code."""
    bandwidth = measure()  # before the daemon is there
    with open_client() as client:
        report = bench(client, plan, bandwidth)
    report["model"]["file"] = path.name
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        print_report(report)
    return 0


def bench(client: Client, plan: Plan, bandwidth: Bandwidth) -> dict[str, Any]:
    """All measurements as one JSON-able object."""
    largest = max(max(plan.prefill) + 1, max(plan.depths) + plan.decode)
    max_ctx = client.hello.get("max_ctx", largest)
    if largest > max_ctx:
        raise ConfigError(f"this needs a context of {largest} tokens; the daemon has {max_ctx} (--max-ctx)")
    prompts = _Prompts(client)
    _timed(client, prompts.next(8), 4)  # the first request pays for what is made on first use
    prefill = [_prefill(client, prompts, size, plan.repeats) for size in plan.prefill]
    decode = [_decode(client, prompts, depth, plan) for depth in plan.depths]
    floor = _floor(_weight_bytes(client.status()), bandwidth, min(result.token_s for result in decode))
    return {
        "model": dict(client.hello.get("model", {})),
        "backend": client.hello.get("backend"),
        "chunk": client.hello.get("chunk"),
        "kv": client.hello.get("kv"),
        "plan": asdict(plan),
        "prefill": [asdict(result) for result in prefill],
        "decode": [asdict(result) for result in decode],
        "floor": asdict(floor) if floor is not None else None,
        "prefill_over_decode": max(result.tokens_per_s for result in prefill)
        / max(result.tokens_per_s for result in decode),
    }


class _Prompts:
    """Random prompts, each another one."""

    def __init__(self, client: Client) -> None:
        self._vocabulary = client.tokenizer.vocab_size
        self._random = random.Random(7)

    def next(self, length: int) -> list[int]:
        return [self._random.randrange(self._vocabulary) for _ in range(length)]


def _timed(client: Client, ids: Sequence[int], max_tokens: int) -> _Timed:
    start = time.perf_counter()
    times = []
    stream = client.stream(ids, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for chunk in stream:
        times += [time.perf_counter()] * len(chunk.ids)
    gap = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
    return _Timed(stream.result(), times[0] - start, gap)


def _prefill(client: Client, prompts: _Prompts, size: int, repeats: int) -> PrefillResult:
    runs = [_timed(client, prompts.next(size), 1) for _ in range(repeats)]
    found = [rates(run.answer).prefill for run in runs]
    return PrefillResult(
        tokens=size,
        tokens_per_s=statistics.median(found),
        tokens_per_s_min=min(found),
        tokens_per_s_max=max(found),
        ttft_s=statistics.median(run.ttft_s for run in runs),
    )


def _decode(client: Client, prompts: _Prompts, depth: int, plan: Plan) -> DecodeResult:
    runs = [_timed(client, prompts.next(depth), plan.decode) for _ in range(plan.repeats)]
    gaps = [run.token_s for run in runs]
    token_s = statistics.median(gaps)
    return DecodeResult(
        depth=depth,
        tokens_per_s=_rate(token_s),
        tokens_per_s_min=_rate(max(gaps)),
        tokens_per_s_max=_rate(min(gaps)),
        token_s=token_s,
        overhead_s=statistics.median(run.token_s - _computing(run.answer) for run in runs),
    )


def _rate(seconds: float) -> float:
    return 1 / seconds if seconds else 0.0


def _computing(answer: Completion) -> float:
    """Seconds of computing per decode step. The first token came out of the prefill."""
    seconds = sum(answer.timings.get(stage, 0.0) for stage in COMPUTE_STAGES)
    return seconds / max(1, len(answer.ids) - 1)


def _weight_bytes(status: Mapping[str, Any]) -> int | None:
    """Bytes of weights as the daemon's memory ledger has them; None when it does not say."""
    found = status.get("memory", {}).get("live", {}).get("weights")
    return found if isinstance(found, int) and found > 0 else None


def _floor(weight_bytes: int | None, bandwidth: Bandwidth, token_s: float) -> Floor | None:
    if weight_bytes is None:
        return None
    least = weight_bytes / bandwidth.bytes_per_s
    return Floor(
        weight_bytes=weight_bytes,
        bandwidth_bytes_per_s=bandwidth.bytes_per_s,
        bandwidth_threads=bandwidth.threads,
        token_s=least,
        reached=least / token_s if token_s else 0.0,
    )


def print_report(report: Mapping[str, Any]) -> None:
    """Tables on stdout."""
    from slotd.client.render import print_facts, print_table

    print_table(
        "Prefill",
        ("prompt", *_RATE_COLUMNS, "first token, ms"),
        [(str(result["tokens"]), *_rates(result), _ms(result["ttft_s"], 1)) for result in report["prefill"]],
    )
    print_table(
        f"Decode, {report['plan']['decode']} tokens",
        ("depth", *_RATE_COLUMNS, "ms per token", "overhead, ms"),
        [
            (
                str(result["depth"]),
                *_rates(result),
                _ms(result["token_s"], 2),
                _ms(result["overhead_s"], 3),
            )
            for result in report["decode"]
        ],
    )
    facts = [
        ("model", str(report["model"].get("file", ""))),
        ("runs of each", f"{report['plan']['repeats']}; without min or max a number is their median"),
        ("prefill / decode, per token", f"{report['prefill_over_decode']:.1f} x"),
    ]
    floor = report["floor"]
    if floor is None:
        facts.append(("floor", "unknown: the daemon does not tell the size of its weights"))
    else:
        facts += [
            ("weights read per token", f"{floor['weight_bytes'] / 1e6:.0f} MB"),
            (
                "memory bandwidth",
                f"{floor['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s, {floor['bandwidth_threads']} threads",
            ),
            ("floor of a decode step", f"{1e3 * floor['token_s']:.2f} ms"),
            ("reached", f"{100 * floor['reached']:.0f}% of the floor's rate"),
        ]
    print_facts(facts)


_RATE_COLUMNS = ("tok/s", "min", "max")


def _rates(result: Mapping[str, Any]) -> tuple[str, str, str]:
    median, least, most = (result[f"tokens_per_s{part}"] for part in ("", "_min", "_max"))
    return f"{median:.1f}", f"{least:.1f}", f"{most:.1f}"


def _ms(seconds: float, digits: int) -> str:
    return f"{1e3 * seconds:.{digits}f}"
