"""Batch lines into jobs, answers into records."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slotd.client.jobs import BadJob, Job, answer_record, delta_record, encode_record, error_record, parse_job
from slotd.protocol.messages import TokenLogprob
from tests.fakes.fake_client import completion

USER = [{"role": "user", "content": "hi"}]


def parse(data: Any, line: int = 3) -> Job:
    return parse_job(line, json.dumps(data).encode())


def test_native_forms() -> None:
    assert parse({"id": "a", "prompt": "x"}) == Job(line=3, id="a", prompt="x")
    assert parse({"id": 5, "ids": [1, 2]}) == Job(line=3, id=5, ids=[1, 2])
    assert parse({"messages": USER}) == Job(line=3, id=None, messages=USER)
    job = parse({"prompt": "x", "params": {"temperature": 0, "stop": "y"}})
    assert job.params == {"temperature": 0.0, "stop": ["y"]}


def test_openai_chat_line() -> None:
    job = parse(
        {
            "custom_id": "c1",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "gpt",
                "user": "me",
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}],
                    }
                ],
                "max_completion_tokens": 7,
                "temperature": 0.5,
                "top_p": 0.9,
                "seed": 3,
                "stop": ["x"],
                "n": 1,
                "stream": False,
                "tools": None,
                "presence_penalty": 0.1,
                "logit_bias": {"5": -100},
            },
        }
    )
    assert job == Job(
        line=3,
        id="c1",
        openai=True,
        messages=USER,
        params={
            "max_tokens": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 3,
            "stop": ["x"],
            "presence_penalty": 0.1,
            "logit_bias": {5: -100.0},
        },
    )


def test_openai_text_line() -> None:
    assert parse({"custom_id": 1, "body": {"prompt": "x"}}) == Job(line=3, id=1, openai=True, prompt="x")
    assert parse({"custom_id": 1, "body": {"prompt": [5, 6]}}).ids == [5, 6]


@pytest.mark.parametrize(
    ("raw", "code", "words"),
    [
        (b"oops", "bad_json", "not JSON"),
        (b'{"prompt": NaN}', "bad_json", "NaN"),
        (b"[" * 50_000, "bad_json", "not JSON"),
        (b'{"prompt":"\xff"}', "bad_utf8", "byte 11"),
        (b"[1]", "bad_job", "not a JSON object"),
    ],
)
def test_lines_that_are_no_job(raw: bytes, code: str, words: str) -> None:
    with pytest.raises(BadJob, match=words) as caught:
        parse_job(1, raw)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        ({"id": "a"}, "bad_job", "exactly one of prompt, ids, messages; this one has none"),
        ({"id": "a", "prompt": "x", "ids": [1]}, "bad_job", "this one has prompt and ids"),
        ({"id": "a", "prompt": "x", "temperature": 0}, "unsupported", "field temperature is not supported"),
        ({"id": "a", "prompt": "x", "params": {"tools": []}}, "unsupported", "'tools' is not supported"),
        ({"id": "a", "prompt": "x", "params": {"top_p": 2}}, "bad_job", "top_p is 2; allowed is"),
        ({"id": "a", "prompt": "x", "params": []}, "bad_job", "params is not an object"),
        ({"id": "a", "prompt": " \n"}, "bad_job", "prompt is empty"),
        ({"id": "a", "prompt": 5}, "bad_job", "prompt is not a text"),
        ({"id": "a", "prompt": "\ud800"}, "bad_job", "surrogate"),
        ({"id": "a", "ids": []}, "bad_job", "at least one token id"),
        ({"id": "a", "ids": [1, -2]}, "bad_job", r"ids\[1\] is -2"),
        ({"id": "a", "ids": [True]}, "bad_job", r"ids\[0\] is True"),
        ({"id": "a", "ids": [2**31]}, "bad_job", r"ids\[0\]"),
        ({"id": "a", "messages": []}, "bad_job", "messages is empty"),
        ({"id": "a", "messages": [{"role": "tool", "content": "x"}]}, "bad_job", "role is 'tool'"),
        ({"custom_id": "a"}, "bad_job", "body is not an object"),
        ({"custom_id": "a", "body": {}}, "bad_job", "neither messages nor prompt"),
        ({"custom_id": "a", "body": {"messages": USER}, "method": "GET"}, "unsupported", "method 'GET'"),
        (
            {"custom_id": "a", "body": {"messages": USER}, "url": "/v1/embeddings"},
            "unsupported",
            "embeddings",
        ),
        ({"custom_id": "a", "body": {"messages": USER, "tools": [1]}}, "unsupported", "body.tools is not"),
        ({"custom_id": "a", "body": {"messages": USER, "n": 2}}, "unsupported", "body.n=2 is not supported"),
        ({"custom_id": "a", "body": {"messages": USER, "stream": True}}, "unsupported", "body.stream=true"),
        (
            {"custom_id": "a", "body": {"messages": USER, "logprobs": True}},
            "unsupported",
            "body.logprobs=true",
        ),
        (
            {"custom_id": "a", "body": {"messages": USER, "max_tokens": 1, "max_completion_tokens": 2}},
            "bad_job",
            "given twice",
        ),
        ({"custom_id": "a", "body": {"messages": USER, "prompt": "x"}}, "unsupported", "body.prompt"),
        (
            {"custom_id": "a", "body": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}},
            "unsupported",
            "'image_url' is not supported",
        ),
        ({"custom_id": "a", "extra": 1, "body": {"messages": USER}}, "unsupported", "field extra"),
    ],
)
def test_refused_by_name_with_the_id(data: dict[str, Any], code: str, words: str) -> None:
    with pytest.raises(BadJob, match=words) as caught:
        parse(data)
    assert (caught.value.code, caught.value.id) == (code, "a")
    assert caught.value.openai == ("custom_id" in data)


@pytest.mark.parametrize(
    "data", [{"id": [], "prompt": "x"}, {"id": 1.5, "prompt": "x"}, {"body": {"prompt": "x"}}]
)
def test_an_id_that_is_none(data: dict[str, Any]) -> None:
    with pytest.raises(BadJob, match="id is not a text or a whole number") as caught:
        parse(data)
    assert caught.value.id is None


def test_native_record() -> None:
    answer = completion(
        (5, 6),
        stop="END",
        finish_reason="stop",
        logprobs=(TokenLogprob(-0.5, ((5, -0.5), (9, -1.5))), TokenLogprob(-1.0, ())),
    )
    record = answer_record(Job(line=4, id="a", prompt="x"), answer, "m")
    assert record == {
        "id": "a",
        "line": 4,
        "text": "t5 t6 ",
        "ids": [5, 6],
        "finish_reason": "stop",
        "stop": "END",
        "prompt_tokens": 10,
        "reasoning": "",
        "cached_tokens": 4,
        "seed": 7,
        "stages": [],
        "timings": answer.timings,
        "logprobs": [
            {"id": 5, "logprob": -0.5, "top": [[5, -0.5], [9, -1.5]]},
            {"id": 6, "logprob": -1.0, "top": []},
        ],
    }


def test_openai_record_has_the_shape_of_a_batch_result() -> None:
    record = answer_record(Job(line=4, id="a", openai=True, messages=USER), completion((5, 6)), "m.gguf")
    assert record["error"] is None
    assert record["custom_id"] == "a"
    body = record["response"]["body"]
    assert body["choices"] == [
        {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": "t5 t6 "}}
    ]
    assert body["usage"]["total_tokens"] == 12
    text = answer_record(Job(line=4, id="a", openai=True, prompt="x"), completion(), "m.gguf")
    assert text["response"]["body"]["choices"][0]["text"] == "t1 t2 t3 "


def test_error_and_delta_records() -> None:
    assert error_record(2, "a", False, "oom", "no room") == {
        "id": "a",
        "line": 2,
        "error": {"code": "oom", "message": "no room"},
    }
    assert error_record(2, "a", True, "oom", "no room")["response"] is None
    assert delta_record(Job(line=1, id="a", prompt="x"), "t", (5,)) == {
        "id": "a",
        "line": 1,
        "delta": "t",
        "ids": [5],
    }


def test_records_are_one_line_of_utf8_whatever_is_in_them() -> None:
    assert encode_record({"text": "ü\n"}) == '{"text": "ü\\n"}\n'.encode()
    assert json.loads(encode_record({"text": "\ud800"})) == {"text": "\ud800"}


def test_thoughts_in_records() -> None:
    answer = completion((5, 6), reasoning="Hm.", reasoning_tokens=4, reasoning_cut=True)
    native = Job(line=1, id="a", prompt="x")
    record = answer_record(native, answer, "m")
    assert (record["reasoning"], record["reasoning_tokens"], record["reasoning_cut"]) == ("Hm.", 4, True)
    assert "reasoning" not in answer_record(native, answer, "m", reasoning=False)
    openai = Job(line=1, id="a", openai=True, messages=USER)
    body = answer_record(openai, answer, "m")["response"]["body"]
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "reasoning_content": "Hm.",
        "content": "t5 t6 ",
    }
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    hidden = answer_record(openai, answer, "m", reasoning=False)["response"]["body"]
    assert "reasoning_content" not in hidden["choices"][0]["message"]
    assert delta_record(native, "", (5,), "H") == {
        "id": "a",
        "line": 1,
        "delta": "",
        "reasoning": "H",
        "ids": [5],
    }


def test_thinking_in_jobs() -> None:
    body = {"messages": USER, "chat_template_kwargs": {"enable_thinking": False}, "thinking_budget": 9}
    job = parse({"custom_id": "a", "body": body})
    assert job.params == {"template_args": {"enable_thinking": False}, "thinking_budget": 9}
    job = parse({"custom_id": "a", "body": {"messages": USER, "enable_thinking": True}})
    assert job.params == {"think": True}
    with pytest.raises(BadJob, match="thinking_budget is 0"):
        parse({"id": "a", "prompt": "x", "params": {"thinking_budget": 0}})
