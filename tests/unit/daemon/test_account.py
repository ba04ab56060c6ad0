from slotd.daemon.account import PARTS, Account


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_parts_sum_to_the_wall_time() -> None:
    clock = Clock()
    account = Account(clock, 100.0)
    for part, seconds in (("restore", 1.0), ("prefill", 0.25), ("decode", 2.0), ("sample", 0.5)):
        account.enter(part)
        clock.now += seconds
    fields = account.close()
    assert fields["wall_s"] == 3.75
    assert sum(fields[f"{part}_s"] for part in PARTS) == fields["wall_s"]
    assert fields["decode_s"] == 2.0


def test_time_before_the_first_part_is_queue_time() -> None:
    clock = Clock()
    account = Account(clock, 97.0)
    account.enter("prefill")
    assert account.close()["queue_s"] == 3.0


def test_inside_returns_to_the_part_before() -> None:
    clock = Clock()
    account = Account(clock, 100.0)
    account.enter("prefill")
    clock.now += 1
    with account.inside("snapshot"):
        clock.now += 2
    clock.now += 4
    fields = account.close()
    assert (fields["prefill_s"], fields["snapshot_s"]) == (5.0, 2.0)
