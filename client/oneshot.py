"""``slotd generate`` and the built-in question of ``slotd try``: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slotd.client.params import ParamDict, effective
from slotd.client.rates import rate_line
from slotd.client.reasoning import ONLY_A_THOUGHT
from slotd.client.render import Screen
from slotd.protocol.errors import ConfigError

if TYPE_CHECKING:
    from slotd.client.client import Client


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and how it is put to the model. `raw`: as plain text, without the chat template."""

    text: str
    system: str | None = None
    raw: bool = False


#: What ``slotd try`` asks when nobody is there to ask.
BUILT_IN = Question("What is the capital of France?")


def read_prompt(argument: str | None, file: str | None) -> str:
    """The prompt from the command line, a file, or stdin. One line end at the end of a file is dropped.

    Raises:
        ConfigError: none or two were given, the file cannot be read, it is empty, or it is not UTF-8.
    """
    if argument is not None and file is not None:
        raise ConfigError("give PROMPT or -f FILE, not both")
    text = argument if argument is not None else _read_text(file)
    if not text.strip():
        raise ConfigError("the prompt is empty")
    return text


def _read_text(file: str | None) -> str:
    if file is None and sys.stdin.isatty():
        raise ConfigError("no prompt: give PROMPT, -f FILE, or text on stdin")
    if file is None or file == "-":
        name, raw = "stdin", sys.stdin.buffer.read()
    else:
        try:
            name, raw = file, Path(file).read_bytes()
        except OSError as error:
            raise ConfigError(f"-f {file}: {error.strerror or error}") from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 at byte {error.start}") from None
    return text.removesuffix("\n").removesuffix("\r")


def run(
    client: Client,
    question: Question,
    params: ParamDict,
    *,
    as_json: bool,
    show_rates: bool,
    reasoning: bool | None = None,
) -> int:
    """Answer on stdout, streamed, or as one JSON object. Returns the exit code.

    It is 1 when the answer ended inside its thought, which stderr says.

    Args:
        reasoning: whether the thought is shown: on stderr, or in the JSON object; None: only there.
    """
    screen = Screen(interactive=sys.stderr.isatty(), show_reasoning=bool(reasoning) and not as_json)
    prompt = _prompt_arguments(client, question)
    try:
        with client.stream(**prompt, on_progress=screen.progress, **params) as stream:
            for chunk in stream:
                screen.reasoning(chunk.reasoning)
                if not as_json:
                    screen.answer(chunk.text)
            answer = stream.result()
    finally:
        screen.end_answer()
    if as_json:
        report = answer.as_dict(reasoning=reasoning is not False)
        report["sampling"] = effective(params, answer.seed)
        print(json.dumps(report, ensure_ascii=False))
    if show_rates:
        screen.notice(rate_line(answer))
    if answer.is_only_thought:
        screen.error(ONLY_A_THOUGHT)
        return 1
    return 0


def _prompt_arguments(client: Client, question: Question) -> dict[str, Any]:
    """The prompt arguments of `Client.stream`: messages where the model has a template, else text."""
    if question.raw or client.tokenizer.chat_template is None:
        if question.system is not None:
            reason = "--raw" if question.raw else "a model without chat template"
            raise ConfigError(f"--system does not go with {reason}")
        return {"prompt": question.text}
    system = [] if question.system is None else [{"role": "system", "content": question.system}]
    return {"messages": [*system, {"role": "user", "content": question.text}]}
