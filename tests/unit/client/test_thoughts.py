"""Thoughts through the client: separated from the answer, bounded by a budget, with a scripted daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from slotd.client import AsyncClient, Client, Completion, ConfigError, DaemonTimeoutError, RequestError
from tests.fakes.fake_daemon import FakeDaemon
from tests.fakes.qwen_templates import QWEN3, QWEN35
from tests.fakes.tiny_gguf import CHATML, IM_END, tokenizer_keys, write_tiny_llama
from tests.fakes.token_lines import bytes_ids

USER = [{"role": "user", "content": "Hi"}]
HEAD = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
THINK, END_THINK = 320, 321
CONTROL, USER_DEFINED = 3, 4
MAX_CTX = 256


def write_model(path: Path, template: str, kind: int | None) -> Path:
    """`kind`: of the tokens <think> and </think>; None: the vocabulary has none."""
    keys = tokenizer_keys(320)
    if kind is not None:
        keys["tokenizer.ggml.tokens"] += ["<think>", "</think>"]
        keys["tokenizer.ggml.token_type"] += [kind, kind]
    return write_tiny_llama(path, n_layer=1, chat_template=template, metadata=keys)


class Rig:
    """A client of a scripted daemon with a model that reasons."""

    def __init__(self, daemon: FakeDaemon, path: Path) -> None:
        self.daemon = daemon
        self.path = path
        self.client = Client.attach(daemon.stdin, daemon.stdout, model=path, reply_timeout=5)

    def ids(self, text: str) -> str:
        return ",".join(map(str, self.client.tokenizer.encode(text)))

    def answer(self, prompt: str, n: int, *tokens: Sequence[int], end: str, fields: str = "") -> None:
        """What the daemon says to a prompt: one line for each group of tokens."""
        at, lines = 0, []
        for group in tokens:
            lines.append(f"[tok] id=$id at={at} ids={','.join(map(str, group))}")
            at += len(group)
        command = f"- {n} id=$id ids={self.ids(prompt)}{fields}"
        self.daemon.expect(command, *lines, f"[done] id=$id {end}")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int | None], Path]:
    folder = tmp_path_factory.mktemp("models")
    kinds = ((QWEN35, USER_DEFINED), (QWEN35, CONTROL), (QWEN35, None), (QWEN3, USER_DEFINED), (CHATML, None))
    return {
        (template, kind): write_model(folder / f"{index}.gguf", template, kind)
        for index, (template, kind) in enumerate(kinds)
    }


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with FakeDaemon(hello=f'{{"id":"$id","max_ctx":{MAX_CTX},"epoch":1}}') as daemon:
        yield daemon


@pytest.fixture
def rig(daemon: FakeDaemon, models: dict[Any, Path], request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(daemon, models[getattr(request, "param", (QWEN35, USER_DEFINED))])
    with rig.client:
        yield rig
    daemon.assert_done()


TAGS = {
    "as tokens": ([THINK], [END_THINK]),
    "as text": (list(bytes_ids("<think>")), list(bytes_ids("</think>"))),
}


@pytest.mark.parametrize(
    ("rig", "tags"),
    [
        ((QWEN35, USER_DEFINED), "as tokens"),
        ((QWEN35, CONTROL), "as tokens"),
        ((QWEN35, None), "as text"),
        ((QWEN35, USER_DEFINED), "as text"),
        ((QWEN3, USER_DEFINED), "as tokens"),
        ((QWEN3, USER_DEFINED), "as text"),
    ],
    indirect=["rig"],
)
@pytest.mark.parametrize("one_by_one", [True, False])
def test_a_thought_is_separated(rig: Rig, tags: str, one_by_one: bool) -> None:
    opening, closing = TAGS[tags]
    opened = "<think>\n" if rig.client.template.render(USER).endswith("<think>\n") else ""
    tokens = [
        *([] if opened else opening),
        *bytes_ids("\nHm: é, stop.\n"),
        *closing,
        *bytes_ids("\n\nYes.\n</think>"),
        IM_END,
    ]
    groups = [[token] for token in tokens] if one_by_one else [tokens]
    rig.answer(HEAD + opened, 99, *groups, end=f"status=stop stop={IM_END} gen={len(tokens)}")
    with rig.client.stream(messages=USER, max_tokens=99, stop="stop") as stream:
        chunks = list(stream)
        done = stream.result()
    assert (done.reasoning, done.text) == (
        "Hm: é, stop.",
        "Yes.\n</think>",
    )  # the stop string is in the thought
    assert "".join(chunk.reasoning for chunk in chunks) == done.reasoning
    assert "".join(chunk.text for chunk in chunks) == done.text
    assert done.ids == tuple(tokens)
    assert done.reasoning_tokens == len(bytes_ids("\nHm: é, stop.\n")) + len(closing)
    assert not done.reasoning_cut
    assert (done.as_dict()["reasoning"], done.as_dict()["text"]) == (done.reasoning, done.text)
    assert "reasoning" not in done.as_dict(reasoning=False)


def test_an_answer_that_ends_inside_its_thought(rig: Rig) -> None:
    rig.answer(HEAD + "<think>\n", 9, bytes_ids("Hm </thin"), end="status=length limit=n_gen gen=9")
    done = rig.client.chat(USER, max_tokens=9)
    assert (done.reasoning, done.text, done.finish_reason) == ("Hm </thin", "", "length")


def test_stop_strings_are_for_the_answer(rig: Rig) -> None:
    said = [*bytes_ids("no\n"), END_THINK, *bytes_ids("\n\na no")]
    rig.answer(HEAD + "<think>\n", 99, said, end="status=length limit=n_gen gen=9")
    rig.daemon.always("CANCEL id=$id", "[cancel] id=$id found=0")
    done = rig.client.chat(USER, max_tokens=99, stop=["no"])
    assert (done.reasoning, done.text, done.stop) == ("no", "a ", "no")


def test_thinking_off_and_other_template_variables(rig: Rig) -> None:
    rig.answer(HEAD + "<think>\n\n</think>\n\n", 9, bytes_ids("Yes"), end="status=length limit=n_gen")
    done = rig.client.chat(USER, max_tokens=9, think=False)
    assert (done.reasoning, done.text) == ("", "Yes")
    rig.answer(HEAD + "<think>\n\n</think>\n\n", 9, bytes_ids("Yes"), end="status=length limit=n_gen")
    rig.client.chat(USER, max_tokens=9, template_args={"enable_thinking": False})


@pytest.mark.parametrize(
    ("prompt", "args", "message"),
    [
        (None, {"think": True, "template_args": {"enable_thinking": True}}, "think is given twice"),
        (None, {"template_args": {"effort": "low"}}, "does not read 'effort'"),
        (None, {"template_args": {"messages": []}}, "'messages' is set by the client"),
        (None, {"template_args": ["x"]}, "template_args must be a mapping"),
        (None, {"think": 1}, "think must be True or False"),
        (None, {"thinking_budget": 0}, "thinking_budget must be 1 or more"),
        ("hi", {"think": False}, "think goes with messages="),
        ([1, 2], {"thinking_budget": 3}, "thinking_budget goes with messages="),
        ("hi", {"template_args": {"x": 1}}, "template_args goes with messages="),
    ],
)
def test_wrong_arguments(rig: Rig, prompt: Any, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rig.client.generate(prompt, messages=USER if prompt is None else None, **args)


@pytest.mark.parametrize("rig", [(CHATML, None)], indirect=True)
def test_a_model_without_thoughts(rig: Rig) -> None:
    """Its text is left alone, and what it cannot do is refused."""
    rig.answer(HEAD, 9, bytes_ids(" <think>a</think>"), end="status=length limit=n_gen")
    assert rig.client.chat(USER, max_tokens=9).text == " <think>a</think>"
    for args in ({"think": False}, {"thinking_budget": 5}):
        with pytest.raises(ConfigError, match=r"enable_thinking|no thoughts"):
            rig.client.chat(USER, **args)


# ----- the budget

FIRST = bytes_ids("Hm, so")
SEED = "seed=18446744073709551615"


def script_budget(
    rig: Rig, *, n: int = 93, first: Sequence[int] = FIRST, closing: str = "\n</think>\n\n"
) -> None:
    """A first answer of six tokens at its budget, a second one of two."""
    done = f"status=length limit=n_gen prompt=40 reused=3 gen=6 {SEED} wall_s=1.5 decode_s=1"
    rig.answer(HEAD + "<think>\n", 6, first, end=done, fields=" min_tokens=6")
    prompt = rig.ids(HEAD + "<think>\n") + "," + ",".join(map(str, first))
    ids = prompt + ("," + rig.ids(closing) if closing else "")
    tail = (
        f"[done] id=$id status=stop stop={IM_END} prompt=51 reused=45 gen=3 wall_s=0.5 decode_s=0.25 epoch=2"
    )
    texts = [
        f"[tok] id=$id at=0 ids={','.join(map(str, bytes_ids('Ye')))}",
        f"[tok] id=$id at=2 ids={IM_END}",
    ]
    rig.daemon.expect(f"- {n} id=$id ids={ids} seed=0 min_tokens=2 fit=1", *texts, tail)


def check_budget(rig: Rig, done: Completion) -> None:
    assert (done.reasoning, done.text, done.reasoning_cut) == ("Hm, so", "Ye", True)
    assert done.ids == (*FIRST, *bytes_ids("Ye"), IM_END)
    assert (done.finish_reason, done.stop) == ("stop", IM_END)
    assert (done.prompt_tokens, done.cached_tokens, done.reasoning_tokens, done.epoch) == (40, 3, 6, 2)
    assert done.seed == 2**64 - 1
    assert done.timings == {"wall_s": 2.0, "decode_s": 1.25}
    assert rig.daemon.ids[-1] == rig.daemon.ids[-2] == done.id


def test_a_thought_that_uses_up_its_budget_is_closed(rig: Rig) -> None:
    script_budget(rig)
    done = rig.client.chat(USER, max_tokens=99, thinking_budget=6, min_tokens=8)
    check_budget(rig, done)


def test_the_budget_with_asyncio(daemon: FakeDaemon, models: dict[Any, Path]) -> None:
    path = models[QWEN35, USER_DEFINED]

    async def talk() -> None:
        async with await AsyncClient.attach(daemon.stdin, daemon.stdout, model=path) as client:
            rig = Rig.__new__(Rig)
            rig.daemon, rig.client = daemon, client  # type: ignore[assignment]
            script_budget(rig)
            check_budget(rig, await client.chat(USER, max_tokens=99, thinking_budget=6, min_tokens=8))

    asyncio.run(talk())
    daemon.assert_done()


def test_a_thought_that_was_closed_in_time_is_not_closed_again(rig: Rig) -> None:
    first = [*bytes_ids("Hm"), END_THINK, *bytes_ids("\n\nA")]
    script_budget(rig, first=first, closing="")
    done = rig.client.chat(USER, max_tokens=99, thinking_budget=6, min_tokens=8)
    assert (done.reasoning, done.text, done.reasoning_cut, done.reasoning_tokens) == ("Hm", "AYe", False, 3)


def test_half_a_character_and_half_a_tag_at_the_budget(rig: Rig) -> None:
    first = [*bytes_ids("H</t"), *bytes_ids("é")[:1], *bytes_ids("\n")]
    script_budget(rig, first=first)
    done = rig.client.chat(USER, max_tokens=99, thinking_budget=6, min_tokens=8)
    assert (done.reasoning, done.text) == ("H</t\ufffd", "Ye")


@pytest.mark.parametrize("most", [1, 6])
def test_an_answer_no_longer_than_its_budget_is_one_request(rig: Rig, most: int) -> None:
    rig.answer(HEAD + "<think>\n", most, bytes_ids("H" * most), end="status=length limit=n_gen")
    done = rig.client.chat(USER, max_tokens=most, thinking_budget=6)
    assert (done.reasoning, done.finish_reason, done.reasoning_cut) == ("H" * most, "length", False)


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (f"status=stop stop={IM_END}", "stop"),
        ("status=length limit=max_ctx", "length"),
        ("status=cancelled", "cancelled"),
    ],
)
def test_an_answer_that_ends_before_its_budget_is_one_request(rig: Rig, end: str, reason: str) -> None:
    rig.answer(HEAD + "<think>\n", 6, bytes_ids("Hm"), end=end)
    assert rig.client.chat(USER, max_tokens=99, thinking_budget=6).finish_reason == reason


def test_a_context_that_is_full_at_the_budget(rig: Rig) -> None:
    """No room for the closing tag and a token: the answer ends, as at any full context."""
    n_prompt = len(rig.client.tokenizer.encode(HEAD + "<think>\n"))
    budget = MAX_CTX - n_prompt - 3
    rig.answer(
        HEAD + "<think>\n", budget, bytes_ids("H" * budget), end="status=length limit=n_gen", fields=" fit=1"
    )
    done = rig.client.chat(USER, thinking_budget=budget)
    assert (done.finish_reason, done.limit, len(done.ids)) == ("length", "max_ctx", budget)


def test_an_answer_that_cannot_fit_is_refused_at_once(rig: Rig) -> None:
    rig.answer(HEAD + "<think>\n", 999, end="status=err code=too_long")
    with pytest.raises(RequestError, match="too_long"):
        rig.client.chat(USER, max_tokens=999, thinking_budget=6)


def test_a_failure_behind_the_budget(rig: Rig) -> None:
    rig.answer(HEAD + "<think>\n", 6, FIRST, end="status=length limit=n_gen")
    ids = ",".join([rig.ids(HEAD + "<think>\n"), *map(str, FIRST), rig.ids("\n</think>\n\n")])
    rig.daemon.expect(f"- 93 id=$id ids={ids} fit=1", "[done] id=$id status=err code=oom")
    with pytest.raises(RequestError, match="oom"):
        rig.client.chat(USER, max_tokens=99, thinking_budget=6)


def test_cancelled_between_the_two_requests(rig: Rig) -> None:
    """Nothing more is sent, and what came is the answer; a deadline that has passed there is one."""
    for timed_out in (False, True):
        rig.answer(HEAD + "<think>\n", 6, FIRST, end=f"status=length limit=n_gen {SEED}")
        stream = rig.client.stream(messages=USER, max_tokens=99, thinking_budget=6)
        next(stream)
        while stream.command.events.empty():
            pass
        stream._timed_out = timed_out
        stream.begin_cancel()
        if timed_out:
            with pytest.raises(DaemonTimeoutError):
                stream.result()
            continue
        done = stream.result()
        assert (done.reasoning, done.text, done.finish_reason, done.seed) == (
            "Hm, so",
            "",
            "cancelled",
            2**64 - 1,
        )
