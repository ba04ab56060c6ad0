import subprocess
import sys
import threading

import pytest

import slotd.client
from slotd.client import (
    Chunk,
    Client,
    ConfigError,
    RequestError,
)
from slotd.protocol.messages import SlotList, TokenLogprob
from tests.fakes.fake_daemon import FakeDaemon
from tests.fakes.tiny_gguf import END_OF_TEXT, IM_END
from tests.fakes.token_lines import PROMPT, bytes_ids, tok, toks


def test_a_generation_from_ids(daemon, client) -> None:
    daemon.expect(
        "- 8 id=$id ids=5,6,7",
        "[prefill] id=$id at=3/3",
        *toks("ab", "c"),
        f"[tok] id=$id at=3 ids={END_OF_TEXT}",
        f"[done] id=$id status=stop prompt=3 reused=2 gen=4 stop={END_OF_TEXT} epoch=1 seed=11 "
        "wall_s=0.5 prefill_s=0.2 decode_s=0.3",
    )
    done = client.generate([5, 6, 7], max_tokens=8)
    daemon.assert_done()
    assert done.text == "abc"
    assert done.ids == (*bytes_ids("abc"), END_OF_TEXT)
    assert (done.finish_reason, done.stop, done.limit) == ("stop", END_OF_TEXT, None)
    assert (done.prompt_tokens, done.cached_tokens, done.seed, done.epoch) == (3, 2, 11, 1)
    assert done.timings == {"wall_s": 0.5, "prefill_s": 0.2, "decode_s": 0.3}
    assert done.id == daemon.ids[-1]


def test_text_and_messages_are_tokenised(daemon, client) -> None:
    ids = client.tokenizer.encode("hello world")
    daemon.expect(f"- 1 id=$id ids={','.join(map(str, ids))}", "[done] id=$id status=length limit=n_gen")
    assert client.generate("hello world", max_tokens=1).finish_reason == "length"
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = client.tokenizer.encode(text)
    assert ids.count(IM_END) == 1
    for _ in range(2):
        daemon.expect(f"- 1 id=$id ids={','.join(map(str, ids))}", "[done] id=$id status=length limit=n_gen")
    messages = [{"role": "user", "content": "hi"}]
    client.generate(messages=messages, max_tokens=1)
    client.chat(messages, max_tokens=1)
    daemon.assert_done()


def test_every_argument_reaches_the_wire(daemon, client) -> None:
    daemon.expect(
        "RESTORE 2 - 9 id=$id ids=5,6 snap=1:3 temperature=0.5 top_k=4 top_p=0.9 min_p=0.1 "
        "repetition_penalty=1.1 penalty_window=7 frequency_penalty=0.2 presence_penalty=0.3 "
        "logit_bias=4:-1.5 seed=6 stop=7,8 logprobs=2 min_tokens=1 ignore_eos=1 fit=1",
        "[done] id=$id status=cancelled",
    )
    done = client.generate(
        [5, 6], slot=2, max_tokens=9, snap=(1, 3), temperature=0.5, top_k=4, top_p=0.9, min_p=0.1,
        repetition_penalty=1.1, penalty_window=7, frequency_penalty=0.2, presence_penalty=0.3,
        logit_bias={4: -1.5}, seed=6, stop_ids=[7, 8], logprobs=2, min_tokens=1, ignore_eos=True, fit=True,
    )  # fmt: skip
    daemon.assert_done()
    assert done.finish_reason == "cancelled"


def test_without_max_tokens_the_context_is_the_limit(daemon, client) -> None:
    daemon.expect("- 64 id=$id ids=5 fit=1", "[done] id=$id status=length limit=max_ctx")
    assert client.generate([5]).limit == "max_ctx"
    daemon.expect("- 62 id=$id ids=5,6", "[done] id=$id status=length limit=n_gen")
    assert client.generate([5, 6], fit=False).limit == "n_gen"
    daemon.expect("- 0 id=$id ids=5", "[done] id=$id status=ok prompt=1")
    assert client.generate([5], max_tokens=0).finish_reason == "length"
    daemon.assert_done()


def test_logprobs(daemon, client) -> None:
    daemon.expect(
        PROMPT,
        "[tok] id=$id at=0 ids=5,6 logprobs=[[-0.5,[[5,-0.5],[9,-1.5]]],[-0.25,[[6,-0.25]]]]",
        "[done] id=$id status=length limit=n_gen",
    )
    with client.stream([5], max_tokens=2, logprobs=2) as stream:
        (chunk,) = list(stream)
        expected = (TokenLogprob(-0.5, ((5, -0.5), (9, -1.5))), TokenLogprob(-0.25, ((6, -0.25),)))
        assert chunk.logprobs == stream.result().logprobs == expected


@pytest.mark.parametrize("verb", ["generate", "stream"])
def test_an_unknown_argument_is_refused_by_name(daemon, client, verb) -> None:
    with pytest.raises(TypeError, match=rf"{verb}\(\) got an unexpected keyword argument 'temprature'"):
        getattr(client, verb)([5], temprature=1.0)
    with pytest.raises(TypeError, match=rf"{verb}\(\) needs either a prompt or messages="):
        getattr(client, verb)()
    with pytest.raises(TypeError, match="either a prompt or messages="):
        getattr(client, verb)("a", messages=[{"role": "user", "content": "b"}])
    assert len(daemon.lines) == 1  # HELLO


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer, not 1.5"),
        ({"max_tokens": True}, "max_tokens must be an integer, not True"),
        ({"max_tokens": -1}, "max_tokens must be 0 or more, not -1"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, not 1"),
        ({"stop": ""}, "stop must be a string or a sequence of strings, none of them empty"),
        ({"stop": [1]}, "stop must be a string"),
        ({"stop_ids": "ab"}, "stop_ids must be a sequence of token ids"),
        ({"logit_bias": [1]}, "logit_bias must be a mapping"),
        ({"logit_bias": {"a": 1}}, "logit_bias id must be an integer"),
        ({"snap": 3}, r"snap must be a pair \(at, slot\), not 3"),
        ({"timeout": 0}, "timeout must be more than 0 seconds"),
        ({"on_progress": 1}, "on_progress must be callable"),
        ({"top_p": 1.5}, "top_p"),  # a range: found when the line is made
    ],
)
def test_a_wrong_argument_is_named_and_nothing_is_sent(daemon, client, arguments, message) -> None:
    with pytest.raises(ConfigError, match=message):
        client.generate([5], **arguments)
    assert len(daemon.lines) == 1


@pytest.mark.parametrize("prompt", [[5, 2**31], [5, "6"], 7, [1.5]])
def test_a_prompt_that_is_no_ids(client, prompt) -> None:
    with pytest.raises(ConfigError, match="prompt must be a sequence of token ids"):
        client.generate(prompt)


def test_a_refused_request(daemon, client) -> None:
    daemon.expect(PROMPT, "[done] id=$id status=err code=overflow prompt=1 n_gen=99 max_ctx=64")
    with pytest.raises(RequestError) as caught:
        client.generate([5], max_tokens=99)
    assert caught.value.code == "overflow"
    assert caught.value.fields == {"prompt": 1, "n_gen": 99, "max_ctx": 64}
    assert caught.value.id == daemon.ids[-1]
    daemon.expect(PROMPT, "[done] id=$id status=length limit=n_gen")
    client.generate([5], max_tokens=1)  # the client goes on


# ----- text: stop strings, characters, what is held back


def test_a_stop_string_over_token_edges_ends_the_request_and_never_leaks(daemon, client) -> None:
    daemon.expect(PROMPT, *toks("The br", "own", " f"))
    daemon.expect("CANCEL id=$id", "[cancel] id=$id found=1", tok(13, [7]), "[done] id=$id status=cancelled")
    with client.stream([5], max_tokens=64, stop=["cat", "own fox"]) as stream:
        chunks = [next(stream), next(stream), next(stream)]
        daemon.say(f"[tok] id={stream.id} at=11 ids={','.join(map(str, bytes_ids('ox')))}")
        chunks += list(stream)
        done = stream.result()
    assert [chunk.text for chunk in chunks] == ["The br", "", "", ""]
    assert done.text == "The br"
    assert (done.finish_reason, done.stop) == ("stop", "own fox")
    assert done.ids == (*bytes_ids("The brown fox"), 7)  # everything the daemon sent
    daemon.assert_done()


def test_withheld_text_is_released_when_it_is_no_stop(daemon, client) -> None:
    daemon.expect(PROMPT, *toks("br", "own", " f", "ish", " own"), "[done] id=$id status=length limit=n_gen")
    with client.stream([5], max_tokens=64, stop="own fox") as stream:
        chunks = list(stream)
    assert [chunk.text for chunk in chunks] == ["br", "", "", "own fish", " ", "own"]
    assert chunks[-1] == Chunk("own")  # what was held back to the end
    assert stream.result().text == "brown fish own"
    assert stream.result().finish_reason == "length"


def test_withheld_text_still_shows_progress(daemon, client) -> None:
    daemon.expect(PROMPT, *toks("a", "a", "a"), "[done] id=$id status=length limit=n_gen")
    chunks = list(client.stream([5], stop="a" * 50))
    assert [(chunk.text, len(chunk.ids)) for chunk in chunks] == [("", 1)] * 3 + [("aaa", 0)]


def test_a_stop_that_only_the_end_decides(daemon, client) -> None:
    daemon.expect(PROMPT, *toks("x", "ab"), "[done] id=$id status=length limit=n_gen")
    done = client.generate([5], stop=["ab", "abc"])
    assert (done.text, done.finish_reason, done.stop) == ("x", "stop", "ab")


def test_a_character_over_two_tokens_comes_whole(daemon, client) -> None:
    emoji = "🦊".encode()
    daemon.expect(PROMPT, *toks(b"a" + emoji[:2], emoji[2:], "b"), "[done] id=$id status=length limit=n_gen")
    stream = client.stream([5])
    assert [chunk.text for chunk in stream] == ["a", "🦊", "b"]
    assert stream.result().text == "a🦊b"


def test_half_a_character_at_the_end_is_replaced(daemon, client) -> None:
    daemon.expect(PROMPT, *toks("a", "🦊".encode()[:2]), "[done] id=$id status=length limit=n_gen")
    assert client.generate([5]).text == "a\ufffd"


def test_a_stop_id_has_no_text(daemon, client) -> None:
    x = bytes_ids("x")[0]
    daemon.expect(PROMPT, *toks("a", "x"), f"[done] id=$id status=stop stop={x}")
    done = client.generate([5], stop_ids=[x])
    assert (done.text, done.stop, done.ids) == ("a", x, tuple(bytes_ids("ax")))


def test_a_client_without_a_model_gives_ids(daemon) -> None:
    with Client.attach(daemon.stdin, daemon.stdout) as client:
        with pytest.raises(ConfigError, match="give model="):
            client.generate("text")
        with pytest.raises(ConfigError, match="give model="):
            client.generate([5], stop="a")
        daemon.expect(PROMPT, *toks("ab"), "[done] id=$id status=length limit=n_gen")
        done = client.generate([5])
        assert (done.text, done.ids) == ("", tuple(bytes_ids("ab")))


# ----- progress, events


def test_an_attached_client_finds_the_model_that_the_daemon_names(tiny_llama) -> None:
    hello = f'{{"id":"$id","max_ctx":64,"model":{{"path":"{tiny_llama}"}}}}'
    with FakeDaemon(hello) as daemon, Client.attach(daemon.stdin, daemon.stdout) as client:
        daemon.expect(PROMPT, *toks("ab"), "[done] id=$id status=length limit=n_gen")
        assert client.generate("hello").text == "ab"


def test_prefill_progress_is_passed_on(daemon, client) -> None:
    lines = [f"[prefill] id=$id at={at}/12" for at in (4, 8, 12)]
    daemon.expect(PROMPT, *lines, *toks("a"), "[done] id=$id status=length limit=n_gen")
    seen = []
    client.generate([5], on_progress=lambda at, of: seen.append((at, of)))
    assert seen == [(4, 12), (8, 12), (12, 12)]


def test_all_cleared_is_known_before_the_answer_it_explains(daemon, client) -> None:
    order = []
    client.on_all_cleared(lambda event: order.append((client.epoch, event.freed, event.kept)))
    client.register_line_callback("[snap] all-cleared", lambda: order.append("line"))
    daemon.expect(
        PROMPT,
        "[snap] all-cleared epoch=4 freed=0,1 kept=2 bytes=99",
        "[done] id=$id status=err code=oom",
    )
    assert client.epoch == 1
    with pytest.raises(RequestError):
        client.generate([5])
    assert order == ["line", (4, (0, 1), (2,))]


def test_event_callbacks(daemon, client) -> None:
    seen = []
    client.register_event_callback(SlotList, seen.append)
    daemon.expect("LIST_SLOTS id=$id", "[snap] slots=1 id=$id", "[done] id=$id status=ok")
    client.slots()
    assert [event.slots for event in seen] == [(1,)]


def test_the_short_verbs(daemon, client) -> None:
    daemon.expect(PROMPT, "[done] id=$id status=length limit=n_gen")
    done = client.generate([5], max_tokens=1)
    taken = ("[snap] slot=2 cur_pos=9 id=$id", "[done] id=$id status=ok")
    daemon.expect(f"SNAPSHOT 2 id=$id of={done.id}", *taken)
    daemon.expect("SNAPSHOT 3 id=$id of=x", "[snap] slot=3 cur_pos=8 id=$id", "[done] id=$id status=ok")
    daemon.expect("LIST_SLOTS id=$id", "[snap] slots=2,3 id=$id", "[done] id=$id status=ok")
    daemon.expect("FREE_SNAPSHOT 2 id=$id", "[snap] freed slot=2 id=$id", "[done] id=$id status=ok")
    daemon.expect("STATUS id=$id", '[status] {"id":"$id","running":0}', "[done] id=$id status=ok")
    daemon.expect("PROPS id=$id", '[props] {"id":"$id","slots":8}', "[done] id=$id status=ok")
    daemon.expect("CANCEL id=other", "[cancel] id=other found=0")
    assert client.snapshot(2) == 9  # of the generation that ended last
    assert client.snapshot(3, of="x") == 8
    assert client.slots() == (2, 3)
    client.free_slot(2)
    assert client.status() == {"running": 0}
    assert client.props() == {"slots": 8}
    assert client.cancel("other") is False
    assert client.hello == {"max_ctx": 64, "epoch": 1}
    assert client.pid is None
    daemon.assert_done()


def test_requests_of_several_threads_do_not_mix(daemon, client) -> None:
    count = 8
    together = threading.Barrier(count + 1)
    for _ in range(count):
        daemon.expect(PROMPT)
    results = {}

    def ask(number: int) -> None:
        with client.stream([number], max_tokens=9) as stream:
            together.wait(10)
            results[number] = (stream.id, stream.result().text)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    together.wait(10)
    ids = daemon.wait_for_ids(1 + count)[1:]
    for at in range(3):
        for id in ids:
            letter = bytes_ids(id[-1])[0]
            daemon.say(f"[tok] id={id} at={at} ids={letter}")
    for id in reversed(ids):
        daemon.say(f"[done] id={id} status=length limit=n_gen")
    for thread in threads:
        thread.join(10)
    assert dict(results.values()) == {id: id[-1] * 3 for id in ids}
    assert len(results) == count


# ----- the package


def test_importing_the_client_is_cheap() -> None:
    heavy = ["numpy", "cupy", "tokenizers", "jinja2", "gguf", "rich", "click", "prompt_toolkit", "asyncio"]
    code = f"import slotd.client, sys; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


def test_the_public_names() -> None:
    assert sorted(slotd.client.__all__) == slotd.client.__all__
    for name in slotd.client.__all__:
        assert getattr(slotd.client, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        slotd.client.Nothing  # noqa: B018
