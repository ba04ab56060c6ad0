from collections.abc import Callable

from slotd.daemon.ops.thread_choice import LATEST, SOONEST, ThreadChoice


def run(choice: ThreadChoice, n: int, cost: Callable[[bool], float]) -> list[bool]:
    """n calls; whether each of them had all threads."""
    modes = []
    for _ in range(n):
        modes.append(choice.all_threads)
        choice.observe(cost(choice.all_threads))
    return modes


def idle(all_threads: bool) -> float:
    return 27.0 if all_threads else 45.0


def crowded(all_threads: bool) -> float:
    return 400.0 if all_threads else 60.0


def test_an_idle_machine_keeps_all_threads_and_tries_rarely() -> None:
    modes = run(ThreadChoice(), 2000, idle)
    assert modes[:SOONEST] == [True] * SOONEST
    assert modes.count(False) <= 16
    assert modes[-LATEST // 2 :].count(False) <= 2


def test_a_crowded_machine_gets_one_thread_soon() -> None:
    modes = run(ThreadChoice(), 200, crowded)
    assert modes[SOONEST + 2 : SOONEST + 8] == [False] * 6
    assert modes.count(True) < 40


def test_a_neighbour_that_comes_is_noticed_at_once() -> None:
    choice = ThreadChoice()
    run(choice, 300, idle)
    modes = run(choice, 12, crowded)
    assert modes[4:] == [False] * 8


def test_a_neighbour_that_leaves_is_noticed() -> None:
    choice = ThreadChoice()
    run(choice, 60, crowded)
    modes = run(choice, 2 * LATEST, idle)
    assert modes[-1]
    assert modes.count(True) > LATEST // 2


def test_equal_costs_change_nothing() -> None:
    choice = ThreadChoice()
    modes = run(choice, 100, lambda _: 30.0)
    assert modes.count(False) <= 8
    assert choice.all_threads


def test_one_slow_call_is_no_alarm() -> None:
    choice = ThreadChoice()
    run(choice, SOONEST + 4, idle)
    choice.observe(1000.0)
    assert choice.all_threads
