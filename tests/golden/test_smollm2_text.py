"""Text of the default model: token ids and chat prompts as other implementations give them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slotd.client.chat_template import ChatTemplate
from slotd.client.detokenizer import Detokenizer
from slotd.client.tokenizer import Tokenizer

pytestmark = pytest.mark.model

DATA = Path(__file__).parent / "data"
TOKENS: list[dict[str, Any]] = json.loads((DATA / "smollm2_tokens.json").read_text("utf-8"))
GENERATE: dict[str, Any] = json.loads((DATA / "smollm2_generate.json").read_text("utf-8"))
GREEDY: list[dict[str, Any]] = json.loads((DATA / "smollm2_greedy.json").read_text("utf-8"))["cases"]


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer.from_file(default_model)


@pytest.fixture(scope="module")
def template(tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)


@pytest.mark.parametrize("case", TOKENS, ids=lambda case: repr(case["text"][:20]))
def test_token_ids(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    ids = tokenizer.encode(case["text"])
    assert ids == case["ids"]
    assert tokenizer.decode(ids, special=True) == case["text"]
    detokenizer = Detokenizer(tokenizer, special=True)
    assert "".join(detokenizer.add([id]) for id in ids) + detokenizer.finish() == case["text"]


def test_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 2, False)
    assert tokenizer.stop_ids == {0, 2}
    assert sum(tokenizer.is_special(id) for id in range(tokenizer.vocab_size)) == 17


def test_chat_prompt_and_answer(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    rendered = template.render(GENERATE["messages"])
    assert rendered == GENERATE["rendered"]
    assert tokenizer.encode(rendered) == GENERATE["prompt_ids"]
    assert tokenizer.decode(GENERATE["greedy_f32_dequant"], special=True) == GENERATE["text"]


@pytest.mark.parametrize("case", GREEDY, ids=lambda case: case["prompt"][:20])
def test_greedy_prompts(tokenizer: Tokenizer, template: ChatTemplate, case: dict[str, Any]) -> None:
    if case["kind"] == "chat":
        assert template.render([{"role": "user", "content": case["prompt"]}]) == case["text"]
    assert tokenizer.encode(case["text"]) == case["ids"]


def test_own_system_message_replaces_the_default_one(template: ChatTemplate) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert template.render(messages, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )
