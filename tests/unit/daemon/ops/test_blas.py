import numpy as np
import pytest
from threadpoolctl import ThreadpoolController

from slotd.daemon.ops.blas import BlasThreads


def blas_threads() -> int:
    return max(library["num_threads"] for library in ThreadpoolController().select(user_api="blas").info())


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> object:
    with ThreadpoolController().limit(limits=None, user_api="blas"):
        yield


def test_without_adapting_nothing_is_set() -> None:
    before = blas_threads()
    with BlasThreads(adapt=False).call("step", 1):
        assert blas_threads() == before


def test_the_number_of_threads_follows_the_choice() -> None:
    threads = BlasThreads(adapt=True)
    if blas_threads() == 1:
        with threads.call("step", 1):
            assert blas_threads() == 1
        return
    seen = set()
    for _ in range(12):
        with threads.call("step", 1):
            seen.add(blas_threads())
            np.ones((64, 64)) @ np.ones((64, 64))
    assert seen == {1, max(seen)}
    assert max(seen) > 1


def test_a_call_that_fails_is_not_measured() -> None:
    threads = BlasThreads(adapt=True)
    with pytest.raises(RuntimeError), threads.call("step", 1):
        raise RuntimeError
    with threads.call("step", 1):
        pass
