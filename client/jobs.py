"""Batch lines into jobs, and answers into records. Pure.

A line is a JSON object in one of two forms:

    {"id": "a", "prompt": "Once upon", "params": {"max_tokens": 32, "temperature": 0}}
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

The first form has exactly one of `prompt` (plain completion), `ids` (token ids) and `messages` (through
the chat template), and `params` by the names of `params.PARAMETERS`. The second is the line of an OpenAI
batch file; its record has the shape of an OpenAI batch result. A field that would change the answer and
is not supported is refused by name, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slotd.client.conversation import Message, check_message, check_messages, check_text
from slotd.client.params import INT31, ParamDict, check, check_all, is_token
from slotd.protocol.errors import ConfigError

if TYPE_CHECKING:
    from slotd.client.completion import Completion

Record = dict[str, Any]
JobId = str | int | None

CHAT_URL = "/v1/chat/completions"
TEXT_URL = "/v1/completions"

#: Body fields of the OpenAI form that become parameters, by their name in `params.PARAMETERS`.
BODY_PARAMS = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "logit_bias": "logit_bias",
    "min_tokens": "min_tokens",
    "ignore_eos": "ignore_eos",
    "enable_thinking": "think",
    "thinking_budget": "thinking_budget",
    "chat_template_kwargs": "template_args",
}

#: Body fields that label a job and change nothing in its answer.
BODY_LABELS = ("model", "user", "metadata")

#: Body fields that may be there as long as they ask for what is done anyway.
BODY_FIXED: Mapping[str, Any] = {"n": 1, "stream": False, "logprobs": False, "echo": False, "best_of": 1}


@dataclass(frozen=True, slots=True)
class Job:
    """One line that can be run. Exactly one of `prompt`, `ids`, `messages` is set."""

    line: int  # number of the input line, from 1
    id: JobId
    openai: bool = False
    prompt: str | None = None
    ids: Sequence[int] | None = None
    messages: list[Message] | None = None
    params: ParamDict = field(default_factory=dict)  # what the line itself says


class BadJob(Exception):
    """A line that cannot be run. It becomes an error record; the other lines are not touched."""

    def __init__(self, code: str, message: str, *, id: JobId = None, openai: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.id = id
        self.openai = openai


def parse_job(line: int, raw: bytes) -> Job:
    """One input line as a job. Raises BadJob, which carries the id if the line has a usable one."""
    try:
        data = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise BadJob("bad_utf8", f"the line is not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise BadJob("bad_json", f"the line is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise BadJob("bad_job", "the line is not a JSON object")
    openai = "custom_id" in data or "body" in data
    job_id = data.get("custom_id" if openai else "id")
    usable = isinstance(job_id, str | int) and not isinstance(job_id, bool)
    try:
        if not usable and (openai or job_id is not None):
            raise ConfigError(f"{'custom_id' if openai else 'id'} is not a text or a whole number")
        return _openai_job(line, data) if openai else _native_job(line, data)
    except ConfigError as error:
        code = "unsupported" if "not supported" in str(error) else "bad_job"
        raise BadJob(code, str(error), id=job_id if usable else None, openai=openai) from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _refuse_unknown(data: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in data:
        if name not in known:
            raise ConfigError(f"{where}{name} is not supported; known are {', '.join(known)}")


def _native_job(line: int, data: dict[str, Any]) -> Job:
    _refuse_unknown(data, ("id", "prompt", "ids", "messages", "params"), "field ")
    forms = [name for name in ("prompt", "ids", "messages") if name in data]
    if len(forms) != 1:
        found = " and ".join(forms) or "none"
        raise ConfigError(f"a job has exactly one of prompt, ids, messages; this one has {found}")
    params = check_all(data.get("params", {}))
    return Job(line=line, id=data.get("id"), params=params, **_work(forms[0], data[forms[0]], forms[0]))


def _work(form: str, value: Any, where: str) -> dict[str, Any]:
    if form == "messages":
        messages = check_messages(value, where)
        if not messages:
            raise ConfigError(f"{where} is empty")
        return {"messages": messages}
    if form == "ids":
        return {"ids": _check_ids(value, where)}
    text = check_text(value, where)
    if not text.strip():
        raise ConfigError(f"{where} is empty")
    return {"prompt": text}


def _check_ids(value: Any, where: str) -> list[int]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where} is not a list of at least one token id")
    for index, token in enumerate(value):
        if not is_token(token):
            raise ConfigError(f"{where}[{index}] is {token!r}; a token id is a whole number, 0 to {INT31}")
    return value


def _openai_job(line: int, data: dict[str, Any]) -> Job:
    _refuse_unknown(data, ("custom_id", "method", "url", "body"), "field ")
    body = data.get("body")
    if not isinstance(body, dict):
        raise ConfigError("body is not an object")
    if data.get("method", "POST") != "POST":
        raise ConfigError(f"method {data['method']!r} is not supported; it is POST")
    form = "messages" if "messages" in body else "prompt"
    if form not in body:
        raise ConfigError("body has neither messages nor prompt")
    url = CHAT_URL if form == "messages" else TEXT_URL
    if data.get("url", url) != url:
        raise ConfigError(f"url {data['url']!r} is not supported for a body with {form}; it is {url}")
    params = _body_params(body, form)
    value = _join_parts(body[form]) if form == "messages" else body[form]
    if form == "prompt" and isinstance(value, list):
        work = _work("ids", value, "body.prompt")
    else:
        work = _work(form, value, f"body.{form}")
    return Job(line=line, id=data["custom_id"], openai=True, params=params, **work)


def _body_params(body: Mapping[str, Any], form: str) -> ParamDict:
    params: ParamDict = {}
    for name, value in body.items():
        if name == form or name in BODY_LABELS or value is None:
            continue
        if name in BODY_FIXED:
            if value != BODY_FIXED[name]:
                raise ConfigError(f"body.{name}={json.dumps(value)} is not supported")
        elif name not in BODY_PARAMS:
            raise ConfigError(f"body.{name} is not supported")
        elif BODY_PARAMS[name] in params:
            raise ConfigError(f"body.{name} is given twice, as max_tokens and max_completion_tokens")
        else:
            params[BODY_PARAMS[name]] = check(BODY_PARAMS[name], value)
    return check_all(params)


def _join_parts(messages: Any) -> Any:
    """Contents given as a list of text parts, joined. Everything else is left for `check_messages`."""
    if not isinstance(messages, list):
        return messages
    joined = []
    for index, message in enumerate(messages):
        if isinstance(message, dict) and isinstance(message.get("content"), list):
            texts = []
            for part in message["content"]:
                if not isinstance(part, dict) or part.get("type") != "text" or set(part) != {"type", "text"}:
                    kind = part.get("type") if isinstance(part, dict) else part
                    raise ConfigError(f"body.messages[{index}].content part {kind!r} is not supported")
                texts.append(check_text(part["text"], f"body.messages[{index}].content"))
            message = check_message({**message, "content": "".join(texts)}, f"body.messages[{index}]")
        joined.append(message)
    return joined


# --------------------------------------------------------------------------------------------------
# Records


def _key(job_id: JobId, openai: bool) -> Record:
    return {"custom_id" if openai else "id": job_id}


def error_record(line: int, job_id: JobId, openai: bool, code: str, message: str) -> Record:
    """The record of a line that has no answer."""
    error = {"code": code, "message": message}
    if openai:
        return {"custom_id": job_id, "line": line, "response": None, "error": error}
    return {"id": job_id, "line": line, "error": error}


def delta_record(job: Job, text: str, ids: Sequence[int], reasoning: str = "") -> Record:
    """A piece of an answer that is still being made (`--stream`), and of the thought before it, if any."""
    thought = {"reasoning": reasoning} if reasoning else {}
    return {**_key(job.id, job.openai), "line": job.line, "delta": text, **thought, "ids": list(ids)}


def restart_record(job: Job) -> Record:
    """Says that the answer begins anew and that earlier deltas of this job count for nothing."""
    return {**_key(job.id, job.openai), "line": job.line, "restart": True}


def answer_record(job: Job, answer: Completion, model: str, *, reasoning: bool = True) -> Record:
    """The record of a finished job. `reasoning`: whether the thought is in it."""
    if job.openai:
        body = _openai_body(job, answer, model, reasoning=reasoning)
        response = {"status_code": 200, "request_id": answer.id, "body": body}
        return {"custom_id": job.id, "line": job.line, "response": response, "error": None}
    return {"id": job.id, "line": job.line, **answer.as_dict(reasoning=reasoning)}


def _openai_body(job: Job, answer: Completion, model: str, *, reasoning: bool) -> Record:
    choice: Record = {"index": 0, "finish_reason": answer.finish_reason}
    if job.messages is not None:
        thought = {"reasoning_content": answer.reasoning} if reasoning and answer.reasoning else {}
        choice["message"] = {"role": "assistant", **thought, "content": answer.text}
    else:
        choice["text"] = answer.text
    return {
        "id": answer.id,
        "object": "chat.completion" if job.messages is not None else "text_completion",
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": len(answer.ids),
            "total_tokens": answer.prompt_tokens + len(answer.ids),
            "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
            **_thought_usage(answer),
        },
    }


def _thought_usage(answer: Completion) -> Record:
    tokens = answer.reasoning_tokens
    return {"completion_tokens_details": {"reasoning_tokens": tokens}} if tokens else {}


def encode_record(record: Record) -> bytes:
    """One line of output. A lone surrogate, which UTF-8 cannot carry, stays escaped."""
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(record, allow_nan=False).encode() + b"\n"
