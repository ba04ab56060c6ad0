import pytest

from slotd.client import commands
from slotd.client.bus import Bus
from slotd.client.commands import State
from slotd.protocol.connection import ClientConnection
from slotd.protocol.errors import DaemonDiedError, RemoteProtocolError, RequestError
from slotd.protocol.messages import Done, Prompt, Tokens


def say(bus: Bus, *lines: str) -> None:
    for line in lines:
        bus.dispatch(line, ClientConnection().receive(line.encode() + b"\n"))


def active(bus: Bus, command: commands.Command) -> commands.Command:
    command.state = State.ACTIVE
    bus.add(command)
    return command


@pytest.mark.parametrize(
    ("command", "line", "answer", "result"),
    [
        (commands.Hello("a"), "HELLO id=a", '[hello] {"id":"a","max_ctx":64}', {"max_ctx": 64}),
        (commands.Status("a"), "STATUS id=a", '[status] {"id":"a","running":1}', {"running": 1}),
        (commands.Props("a"), "PROPS id=a", '[props] {"id":"a","inactive":{}}', {"inactive": {}}),
        (commands.Snapshot("a", 3, "r"), "SNAPSHOT 3 id=a of=r", "[snap] slot=3 cur_pos=9 id=a", 9),
        (commands.Snapshot("a", 3, None), "SNAPSHOT 3 id=a", "[snap] slot=3 cur_pos=9 id=a", 9),
        (commands.FreeSnapshot("a", 3), "FREE_SNAPSHOT 3 id=a", "[snap] freed slot=3 id=a", None),
        (commands.ListSlots("a"), "LIST_SLOTS id=a", "[snap] slots=0,3 id=a", (0, 3)),
    ],
)
def test_a_command_its_line_and_its_answer(command, line, answer, result) -> None:
    assert ClientConnection().send(command.request) == line.encode() + b"\n"
    assert command.state is State.NEW
    bus = Bus()
    active(bus, command)
    say(bus, answer.replace("id=a", "id=b").replace('"id":"a"', '"id":"b"'))  # the answer to another
    assert not command.result.done()
    say(bus, answer)
    assert command.result.result(0) == result
    assert not command.finished.done()  # the answer is known, the wire is not quiet yet
    assert command.state is State.ACTIVE
    say(bus, "[done] id=a status=ok wall_s=0.1")
    assert command.finished.done()
    assert command.state is State.DONE
    assert bus.waiters == 0


@pytest.mark.parametrize(
    "line", ["[done] id=a status=err code=bad_slot slot=9 limit=8", "err bad_slot slot=9 limit=8 id=a"]
)
def test_a_refusal_is_a_request_error_with_the_fields(line) -> None:
    bus = Bus()
    command = active(bus, commands.Snapshot("a", 9, None))
    say(bus, line)
    with pytest.raises(RequestError) as caught:
        command.result.result(0)
    assert caught.value.code == "bad_slot"
    assert caught.value.fields == {"slot": 9, "limit": 8}
    assert (caught.value.id, caught.value.verb) == ("a", "SNAPSHOT")
    assert command.finished.done()
    assert bus.waiters == 0


def test_an_end_without_the_answer_is_an_error_too() -> None:
    bus = Bus()
    command = active(bus, commands.ListSlots("a"))
    say(bus, "[done] id=a status=ok")
    with pytest.raises(RemoteProtocolError, match="LIST_SLOTS a ended without its answer"):
        command.result.result(0)


def test_cancel_answers_go_to_the_cancel_and_not_to_its_target() -> None:
    bus = Bus()
    first = active(bus, commands.Cancel("a"))
    target = active(bus, commands.Generation(Prompt(id="a", ids=[1], n_gen=4)))
    second = active(bus, commands.Cancel("a"))
    say(bus, "[tok] id=a at=0 ids=5", "[cancel] id=a found=1", "[cancel] id=a found=0")
    assert first.result.result(0) is True
    assert second.result.result(0) is False
    assert first.state is State.DONE
    assert target.state is State.ACTIVE
    assert target.events.qsize() == 1
    assert bus.waiters == 1


def test_a_cancelled_generation_stays_until_its_last_line() -> None:
    bus = Bus()
    command = commands.Generation(Prompt(id="a", ids=[1], n_gen=4))
    active(bus, command)
    command.state = State.CANCELLING
    say(bus, "[tok] id=a at=0 ids=5")
    assert bus.waiters == 1
    say(bus, "[done] id=a status=cancelled")
    assert (bus.waiters, command.state) == (0, State.DONE)
    assert command.events.get(timeout=0) == Tokens(id="a", at=0, ids=(5,))
    last = command.events.get(timeout=0)
    assert isinstance(last, Done)
    assert last.status == "cancelled"
    assert command.events.empty()


def test_the_death_of_the_daemon_ends_every_command() -> None:
    bus = Bus()
    listing = active(bus, commands.ListSlots("a"))
    generation = commands.Generation(Prompt(id="b", ids=[1], n_gen=4))
    active(bus, generation)
    bus.fail(DaemonDiedError("gone"))
    for command in (listing, generation):
        assert command.state is State.DONE
        with pytest.raises(DaemonDiedError, match="gone"):
            command.result.result(0)
        assert command.finished.done()
    assert isinstance(generation.events.get(timeout=0), DaemonDiedError)


def test_a_death_behind_the_answer_is_told_to_nobody() -> None:
    bus = Bus()
    command = active(bus, commands.ListSlots("a"))
    say(bus, "[snap] slots=1 id=a")
    assert bus.fail(DaemonDiedError("gone")) == 0
    assert command.result.result(0) == (1,)


def test_a_listener_that_fails_harms_nobody() -> None:
    bus = Bus()
    command = commands.Generation(Prompt(id="a", ids=[1], n_gen=4))

    def closed_loop() -> None:
        raise RuntimeError("Event loop is closed")

    command.listen(closed_loop)
    active(bus, command)
    say(bus, "[tok] id=a at=0 ids=5", "[done] id=a status=stop stop=5")
    assert command.state is State.DONE


def test_a_version_1_daemon_refuses_hello_without_an_id() -> None:
    bus = Bus()
    command = active(bus, commands.Hello("a"))
    say(bus, "err unknown_command verb=HELLO")
    with pytest.raises(RequestError, match="unknown_command"):
        command.result.result(0)


def test_ids_differ_within_a_client_and_between_clients() -> None:
    sources = [commands.IdSource() for _ in range(50)]
    ids = [source() for source in sources for _ in range(3)]
    assert len(set(ids)) == 150
