"""Whether a matrix product should use all BLAS threads or one, from what calls really cost.

On an idle machine two threads are nearly twice as fast as one. Beside another busy process they are many
times slower: a product waits for its slowest thread, and that one waits for a time slice of the scheduler,
some two hundred times for every token (measured on 2 cores with one busy process: 300 ms and more for a
step that takes 27 ms with two threads alone, and 45 ms with one). No clock and no threads in here.
"""

from __future__ import annotations

from collections import deque

#: Calls that are tried in the other mode before a choice.
TRIES = 2

#: Calls between two tries: four times as many whenever the choice stays, up to the last one.
SOONEST, LATEST = 8, 512

#: The other mode must be this much cheaper to be taken: less is noise.
GAIN = 0.9

#: A call that costs this many times what it used to is a reason to try the other mode now.
ALARM = 2.5


class ThreadChoice:
    """All threads or one, for one kind of call whose costs compare with each other."""

    def __init__(self) -> None:
        self.all_threads = True
        self._trying = False
        self._calls = 0
        self._until_try = SOONEST
        self._costs: deque[float] = deque(maxlen=64)  # of the mode in use, newest last
        self._tried: list[float] = []

    def observe(self, cost: float) -> None:
        """Take what the call in the present mode cost, in any unit, and decide on the next one's."""
        if self._trying:
            self._tried.append(cost)
            if len(self._tried) == TRIES:
                self._decide()
            return
        self._costs.append(cost)
        self._calls += 1
        if self._calls >= self._until_try or self._is_alarming():
            self._trying, self._tried = True, []
            self.all_threads = not self.all_threads

    def _is_alarming(self) -> bool:
        """Two calls in a row that cost a multiple of the best one lately."""
        return self._calls >= TRIES and min(list(self._costs)[-TRIES:]) > ALARM * min(self._costs)

    def _decide(self) -> None:
        self._trying, self._calls = False, 0
        recent = list(self._costs)[-TRIES:]
        if min(self._tried) < GAIN * min(recent):
            self._costs.clear()
            self._costs.extend(self._tried)
            self._until_try = SOONEST
        else:
            self.all_threads = not self.all_threads
            self._until_try = min(4 * self._until_try, LATEST)
            # What was normal lately is normal now; else the same alarm would ring at once again.
            self._costs.clear()
            self._costs.extend(recent)
