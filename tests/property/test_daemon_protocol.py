"""P1, P2, P4, P5, P6 of the reference on real daemons. P3 is in protocol/test_version_1.py.

All examples of a test share one daemon: whatever one example says must not disturb the next.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import select
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from slotd.protocol.errors import CODES, RequestError
from slotd.protocol.grammar import ends_stream
from slotd.protocol.messages import (
    Cancelled,
    Command,
    Done,
    Error,
    Event,
    Quit,
    Restored,
    SnapFreed,
    SnapInline,
    SnapInlineFailed,
    Tokens,
    Unparked,
    Unsupported,
)
from slotd.protocol.wire import parse_command, parse_event
from tests.fakes.daemon_process import DaemonProcess
from tests.fakes.front_rig import generate_line
from tests.fakes.tiny_gguf import write_tiny_llama

MAX_LINE, N_VOCAB, MAX_CTX = 4096, 320, 256
PATIENCE = 30.0
HUGE = 2**31 - 1

#: Lines on the way to an end, which end nothing themselves.
NOTICES = Restored | SnapInline | SnapInlineFailed


def some(max_examples: int) -> settings:
    slow = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    return settings(max_examples=max_examples, deadline=None, derandomize=True, suppress_health_check=slow)


class Client:
    """A client that never waits without a bound, and can tell what belongs to a line from what follows it."""

    PROBE = "- 3 ids=5,6,7 ignore_eos=1"

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        self.version = 1
        self.numbers = itertools.count()
        daemon.send(self.PROBE)
        self.known = self.response()
        assert len(self.known) == 3

    def hello(self) -> None:
        """Speak version 2 from here on."""
        self.daemon.send("HELLO")
        self.daemon.wait_json("hello")
        self.version = 2

    def new_id(self) -> str:
        return f"c{next(self.numbers)}"

    def next_event(self) -> Event:
        return parse_event(self.daemon.next_line(PATIENCE))

    def response(self) -> list[int]:
        """Ids of the token stream up to the next -1."""
        ids: list[int] = []
        while (value := self._stream_value()) != -1:
            assert 0 <= value < N_VOCAB
            ids.append(value)
        return ids

    def _stream_value(self) -> int:
        readable, _, _ = select.select([self.daemon._stream_read], [], [], PATIENCE)
        assert readable, "the response on the token stream does not end"
        return self.daemon.read_stream_value()

    def ask(self, line: bytes) -> tuple[list[Event], list[list[int]]]:
        """Send a line: the events and the responses that come before those of the commands behind it.

        Behind it come replies that no other line gets, an unpark, in case it parked, and a known answer.
        """
        self.daemon.send_bytes(line + b"\n")
        self.daemon.send("FREE_SNAPSHOT 7", "unpark", self.PROBE, "FREE_SNAPSHOT 6")
        events = self._until(SnapFreed(slot=7))
        after = self._until(SnapFreed(slot=6))
        if self.version == 2:
            after.append(self.next_event())
        assert Counter(map(type, after)) <= Counter({Unparked: 1, Done: 4 * (self.version - 1)})
        responses = [self.response()]
        while responses[-1] != self.known:
            responses.append(self.response())
        assert responses[-2] == []  # of unpark
        return events, responses[:-2]

    def _until(self, last: Event) -> list[Event]:
        events = []
        while (event := self.next_event()) != last:
            events.append(event)
        return events

    def still_well(self) -> None:
        """A request with an id is answered as it always was, and so is one on the token stream."""
        produced, done = self.daemon.generate([5, 6, 7], 3, "ignore_eos=1", self.new_id())
        assert (produced, done.status) == (self.known, "length")
        self.daemon.send(self.PROBE)
        assert self.response() == self.known


def start(model: Path, *flags: str) -> DaemonProcess:
    return DaemonProcess(model, f"--max-ctx={MAX_CTX}", f"--max-line={MAX_LINE}", *flags)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[Client]:
    """Speaks version 1; ids work there too."""
    with start(model) as daemon:
        yield Client(daemon)


@pytest.fixture(scope="module")
def client_2(model: Path) -> Iterator[Client]:
    """Has said HELLO."""
    with start(model) as daemon:
        made = Client(daemon)
        made.hello()
        yield made


# ----- lines

words = st.sampled_from(
    ["-", "RESTORE", "SNAPSHOT", "FREE_SNAPSHOT", "LIST_SLOTS", "park", "unpark", "free", "drafter",
     "compress", "generate", "SNAPSHOT_THIN", "RESTORE_CHAIN", "CANCEL", "STATUS", "PROPS", "all", "draft",
     "target", "parkour", "0", "1", "3", "8", "-1", "99999999999", "1e3", "/no/such/file", "x.bin",
     "/dev/zero", "/",
     "ids=5,6", "ids=", "ids=5,x", "ids=5,999", "snap=2:1", "snap=9:1", "snap=1:99", "samp=0.8", "samp=nan",
     "top_p=2", "seed=1", "stop=5", "logprobs=2", "of=a", "fit=1", "min_tokens=9", "unknown=1", '"', '"a b"',
     "\\", "\u00e9", "\x00", "\t"]
)  # fmt: skip
shapes = st.sampled_from(
    ["- 3 ids=5,6 {}", "- 0 ids=5,6,7,8 snap=2:1 {}", "RESTORE 1 - 2 ids=5,6,7,8 {}", "SNAPSHOT 1 {}",
     "LIST_SLOTS {}", "park {}", "unpark {}", "free drafter {}", "compress a 5 b {}", "CANCEL {}",
     "STATUS {}", "{} 3 ids=5"]
)  # fmt: skip
texts = st.one_of(
    st.lists(words, max_size=6).map(" ".join),
    st.builds(lambda shape, word: shape.format(word), shapes, st.just("") | words),
    st.text(max_size=40).filter(lambda text: not any("\ud800" <= char <= "\udfff" for char in text)),
)
binary = st.binary(max_size=60) | st.sampled_from(
    [b"", b" ", b"\r", b"\xff\xfe", b"\x00", b"x" * (MAX_LINE + 5), b"- 1 ids=" + b"5," * MAX_LINE]
)


def read(line: bytes) -> Command | RequestError:
    """What the grammar makes of a line."""
    if len(line) > MAX_LINE:
        return RequestError("line_too_long")
    try:
        return parse_command(line.removesuffix(b"\r").decode())
    except UnicodeDecodeError:
        return RequestError("bad_utf8")
    except RequestError as error:
        return error


def is_one_line_that_ends_nothing(line: bytes) -> bool:
    return b"\n" not in line and not isinstance(read(line), Quit)


lines = (texts.map(str.encode) | binary).filter(is_one_line_that_ends_nothing)


def responses_due(line: bytes) -> int:
    """How many -1 the token stream owes to a line without an id."""
    command = read(line)
    if isinstance(command, RequestError):
        return int(ends_stream(command.verb))
    return int(command.needs_stream_end if isinstance(command, Unsupported) else command.ends_stream)


# ----- P1, P2


@some(120)
@given(line=lines)
def test_p1_p2_a_line_of_version_1_ends_once_on_the_channel_that_is_due(client: Client, line: bytes) -> None:
    events, responses = client.ask(line)
    ends = [event for event in events if not isinstance(event, NOTICES)]
    assert len(responses) == responses_due(line)
    assert len(ends) + len(responses) >= 1
    assert len(ends) <= 1
    for event in ends:
        assert not isinstance(event, Done | Tokens)
        if isinstance(event, Error):
            assert event.code in CODES
            assert not any(responses)
    if isinstance(read(line), RequestError):
        assert isinstance(ends[0], Error)


@some(80)
@given(line=lines)
def test_p1_p2_a_line_of_version_2_ends_with_one_done_line(client_2: Client, line: bytes) -> None:
    events, responses = client_2.ask(line)
    (end,) = (event for event in events if isinstance(event, Done | Cancelled))
    assert events[-1] is end
    assert not any(isinstance(event, Error) for event in events)
    assert len(responses) == responses_due(line)
    if isinstance(read(line), RequestError):
        assert isinstance(end, Done)
        assert end.fields["code"] in CODES
    if isinstance(end, Done) and end.status == "err":
        assert not any(responses)


@some(100)
@given(text=texts)
def test_p1_p2_a_line_with_an_id_ends_with_one_line_of_that_id(client: Client, text: str) -> None:
    request_id = client.new_id()
    line = f"{text} id={request_id}".encode()
    assume(is_one_line_that_ends_nothing(line))
    assume(read(line).id == request_id)  # an open quote may have swallowed it
    client.daemon.send_bytes(line + b"\n")
    ends: list[Event] = []
    while not ends:
        event = client.next_event()
        ends += [event] if isinstance(event, Done | Cancelled) else []
    events, responses = client.ask(b"STATUS")
    assert (ends[0].id, responses, len(events)) == (request_id, [], 1)


others = ["CANCEL", "nonsense", "park draft", "LIST_SLOTS", "- 9 ids=5,999", "SNAPSHOT 1", "compress"]
prompts = st.sampled_from([0, 1, 7, 40, 120]).map(lambda n: f"- {n} ids=5,6,7 ignore_eos=1")
lane = st.lists(prompts | st.sampled_from(others), max_size=8)


@pytest.fixture(scope="module")
def long_answer(client: Client) -> list[int]:
    client.daemon.send("- 120 ids=5,6,7 ignore_eos=1")
    return client.response()


@some(20)
@given(commands=lane)
def test_p2_no_minus_one_is_lost_or_stands_inside_an_answer(
    client: Client, long_answer: list[int], commands: list[str]
) -> None:
    client.daemon.send(*commands)
    for command in commands:
        if not responses_due(command.encode()):
            continue
        response = client.response()
        n_gen = int(command.split()[1]) if command.startswith("- ") and "999" not in command else 0
        assert response == long_answer[: len(response)]
        assert len(response) == n_gen or (len(response) < n_gen and "CANCEL" in commands)
    client.daemon.send("FREE_SNAPSHOT 7")
    client.daemon.wait_line("[snap] freed slot=7")
    client.still_well()


# ----- P4

numbers = st.sampled_from([0, 1, 7, 8, 9, 63, 64, 255, 256, HUGE, 2**31, 2**64]) | st.integers(0, 300)
wild_prompts = st.builds(
    lambda head, n_gen, length, snap, tail: f"{head} {n_gen} ids={','.join(['5'] * length)}{snap}{tail}",
    st.just("-") | numbers.map(lambda slot: f"RESTORE {slot} -"),
    numbers,
    st.sampled_from([0, 1, 5, 64, 200, 255, 256, 257]),
    st.just("") | st.builds(lambda at, slot: f" snap={at}:{slot}", numbers, numbers),
    st.sampled_from(["", " fit=1", " stop=5", " min_tokens=3", " temperature=1 seed=3", " ignore_eos=1"]),
)
wild = wild_prompts | st.builds(
    lambda verb, slot: f"{verb} {slot}", st.sampled_from(["SNAPSHOT", "FREE_SNAPSHOT", "park"]), numbers
)
EXPECTED = {"bad_args", "bad_slot", "overflow", "empty_prompt", "empty_slot", "prefix_shorter",
            "prefix_mismatch", "nothing_to_snapshot"}  # fmt: skip


@some(40)
@given(commands=st.lists(wild, min_size=1, max_size=4))
def test_p4_wild_numbers_break_nothing(client: Client, commands: list[str]) -> None:
    sent = {client.new_id(): command for command in commands}
    client.daemon.send(*(f"{command} id={request_id}" for request_id, command in sent.items()))
    for request_id, command in sent.items():
        done = client.daemon.wait_done(request_id, PATIENCE)
        assert done.status in ("ok", "stop", "length") or done.fields["code"] in EXPECTED, (command, done)
    client.still_well()


# ----- P5

ABANDONING_CLIENT = Path(__file__).resolve().parents[1] / "fakes" / "abandoning_client.py"


@pytest.mark.parametrize(("fields", "reads"), [("", "stream"), ("id=r", "lines"), ("", "nothing")])
def test_p5_a_client_killed_in_mid_stream_leaves_no_daemon_behind(
    model: Path, fields: str, reads: str
) -> None:
    line = f"- 90000 ids=5,6,7 ignore_eos=1 {fields}".rstrip()
    argv = [sys.executable, str(ABANDONING_CLIENT), str(model), line, reads]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        pid = int(killed.stdout.readline())
        killed.kill()
    end = time.monotonic() + PATIENCE
    while is_running(pid):
        assert time.monotonic() < end, "the daemon outlives its client"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def leave_stream(daemon: DaemonProcess) -> None:
    """Close the reading end of the token stream."""
    assert daemon._stream_read is not None
    os.close(daemon._stream_read)
    daemon._stream_read = None


def test_p5_a_stream_reader_that_leaves_in_mid_answer_disturbs_nobody(model: Path, tmp_path: Path) -> None:
    with DaemonProcess(model, "--max-ctx=100000") as daemon:
        alone, _ = daemon.generate([5, 6, 9], 200, "ignore_eos=1", "alone")
        daemon.send("- 90000 ids=5,6,7 ignore_eos=1", generate_line(tmp_path, tmp_path / "out.bin", 20))
        daemon.read_stream_value()
        daemon.send("- 200 ids=5,6,9 ignore_eos=1 id=beside")
        leave_stream(daemon)
        beside: list[int] = []
        replies: list[str] = []
        while "beside" not in replies or "ok" not in replies:
            event = parse_event(daemon.next_line(PATIENCE))
            if isinstance(event, Tokens):
                beside.extend(event.ids)
            replies.append("beside" if isinstance(event, Done) else type(event).__name__.lower())
        assert beside == alone


def test_p5_an_unread_rest_of_an_ended_answer_cancels_nothing_else(model: Path, tmp_path: Path) -> None:
    """The reader leaves while the daemon still holds ids of an answer that is over; `generate` runs now."""
    with DaemonProcess(model, "--max-ctx=100000") as daemon:
        assert daemon._stream_read is not None
        fcntl.fcntl(daemon._stream_read, fcntl.F_SETPIPE_SZ, 4096)
        daemon.send("- 1500 ids=5,6,7,8,9 ignore_eos=1", generate_line(tmp_path, tmp_path / "out.bin", 2000))
        running: list[int] = []
        while running != [3]:  # the prompt of generate; that of the answer has 5 ids
            daemon.send("STATUS")
            running = [entry["prompt"] for entry in daemon.wait_json("status")["running"]]
        leave_stream(daemon)
        assert daemon.wait_line("ok ", PATIENCE / 2).startswith("ok N=3 gen=")


# ----- P6

TEXTS = ([5, 6, 7], list(range(20, 90)), [9] * 40)
orders = st.lists(
    st.tuples(st.just("open"), st.integers(0, 2), st.sampled_from([0, 1, 10, 60]))
    | st.tuples(st.just("cancel"), st.integers(0, 7), st.just(0)),
    min_size=2,
    max_size=16,
)


@pytest.fixture(scope="module")
def answers(client: Client) -> list[list[int]]:
    return [client.daemon.generate(ids, 60, "ignore_eos=1", client.new_id())[0] for ids in TEXTS]


@some(40)
@given(orders=orders)
def test_p6_replies_belong_to_their_request_whatever_is_cancelled(
    client: Client, answers: list[list[int]], orders: list[tuple[str, int, int]]
) -> None:
    opened: dict[str, tuple[int, int]] = {}
    cancels: Counter[str] = Counter()
    for order, number, n_gen in orders:
        if order == "open":
            request_id = client.new_id()
            opened[request_id] = (number, n_gen)
            ids = ",".join(map(str, TEXTS[number]))
            client.daemon.send(f"- {n_gen} ids={ids} ignore_eos=1 id={request_id}")
        else:
            request_id = list(opened)[number % len(opened)] if opened else "nobody"
            cancels[request_id] += 1
            client.daemon.send(f"CANCEL id={request_id}")

    produced: defaultdict[str | None, list[int]] = defaultdict(list)
    done: dict[str | None, Done] = {}
    found: defaultdict[str | None, list[bool]] = defaultdict(list)
    while len(done) < len(opened) or sum(map(len, found.values())) < cancels.total():
        event = client.next_event()
        assert event.id not in done or isinstance(event, Cancelled)
        if isinstance(event, Tokens):
            assert event.at == len(produced[event.id])
            produced[event.id].extend(event.ids)
        elif isinstance(event, Done):
            done[event.id] = event
        elif isinstance(event, Cancelled):
            found[event.id].append(event.found)

    assert {request_id: len(each) for request_id, each in found.items()} == cancels
    assert found["nobody"] == [False] * cancels["nobody"]
    for request_id, (number, n_gen) in opened.items():
        got, end = produced[request_id], done[request_id]
        assert got == answers[number][: len(got)]
        assert end.fields["gen"] == len(got)
        if end.status == "cancelled":
            assert any(found[request_id])
        else:
            assert (end.status, len(got)) == ("length" if n_gen else "ok", n_gen)
    client.still_well()
