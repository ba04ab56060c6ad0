from __future__ import annotations

import datetime
import subprocess
import sys
from typing import Any

import pytest

from slotd.client.chat_template import ChatTemplate, TemplateError
from slotd.protocol.errors import SlotdError
from tests.fakes.tiny_gguf import CHATML

USER = {"role": "user", "content": "Hi"}
ALTERNATE = (
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ message['content'] }}{% endfor %}"
)


def render(source: str, messages: Any = None, **variables: Any) -> str:
    return ChatTemplate(source).render([USER] if messages is None else messages, **variables)


def test_chatml() -> None:
    template = ChatTemplate(CHATML)
    assert template.render([USER]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render([USER], add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_variables() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}|{{ tools }}|{{ documents }}|{{ think }}"
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    assert template.render([USER], tools=[{"n": "f"}], think=False) == "<s>Hi</s>|[{'n': 'f'}]|None|False"


def test_undefined_variables_are_empty() -> None:
    assert render("a{{ nothing }}b{% if other is defined %}c{% endif %}") == "ab"


def test_blocks_leave_no_blank_lines() -> None:
    assert render("{% if true %}\n  {% set x = 1 %}\nA\n{% endif %}\nB") == "A\nB"


def test_loop_controls() -> None:
    assert (
        render(
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
            "{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        )
        == "02"
    )


def test_generation_block_is_its_content() -> None:
    assert render("a{% generation %}b{{ messages[0].role }}{% endgeneration %}c") == "abuserc"


def test_tojson_is_plain_json() -> None:
    value = {"é": "<b>'&", "a": [1, None, True]}
    assert render("{{ value | tojson }}", value=value) == '{"é": "<b>\'&", "a": [1, null, true]}'
    assert render("{{ value | tojson(sort_keys=true, separators=(',', ':')) }}", value={"b": 1, "a": 2}) == (
        '{"a":2,"b":1}'
    )
    assert render("{{ value | tojson(indent=1) }}", value=[1]) == "[\n 1\n]"


def test_strftime_now() -> None:
    before = datetime.date.today()
    rendered = render("{{ strftime_now('%Y-%m-%d') }}")
    assert before <= datetime.date.fromisoformat(rendered) <= datetime.date.today()


# ----- failures


def test_template_that_refuses_leaves_everything_usable() -> None:
    template = ChatTemplate(ALTERNATE)
    with pytest.raises(TemplateError, match=r"refuses the messages: roles must alternate"):
        template.render([USER, USER])
    assert template.render([USER, {"role": "assistant", "content": " there"}]) == "Hi there"
    assert issubclass(TemplateError, SlotdError)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{{ messages[5].content.x }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ range(10 ** 9) | length }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'other' %}",
        "{{ messages | tojson(indent=bad.x) }}",
        "{{ strftime_now(1) }}",
    ],
)
def test_template_that_fails(source: str) -> None:
    template = ChatTemplate(source)
    with pytest.raises(TemplateError, match=r"the chat template failed: ."):
        template.render([USER])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "does not compile: line 1: "),
        ("a\n{{ x | nofilter }}", "does not compile: line 2: No filter named 'nofilter'"),
        ("{% generation %}", "does not compile"),
        ("(" * 3 + "{{" + "(" * 5000, "does not compile"),
    ],
)
def test_template_that_does_not_compile(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(source)


@pytest.mark.parametrize("source", [None, ""])
def test_file_without_template(source: str | None) -> None:
    with pytest.raises(TemplateError, match=r"no chat template.*plain prompt"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages must be a list, not str"),
        (USER, "messages must be a list, not dict"),
        ([], "messages is empty"),
        ([USER, "hi"], r"messages\[1\] must be an object, not str"),
        ([{"content": "x"}], r"messages\[0\] has no 'role'"),
        ([USER, USER, {"role": "user"}], r"messages\[2\] has no 'content'"),
        ([{"role": "user", "content": None}], r"messages\[0\]\['content'\] must be a string, not NoneType"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"\['content'\] must be a string, not list"),
        ([{"role": 1, "content": "x"}], r"messages\[0\]\['role'\] must be a string, not int"),
    ],
)
def test_malformed_messages_are_named(messages: Any, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        render(CHATML, messages)


def test_importing_the_module_does_not_import_the_library() -> None:
    code = "import sys, slotd.client.chat_template; sys.exit('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
