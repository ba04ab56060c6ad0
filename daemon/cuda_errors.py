"""Failures after which a CUDA context is gone: every later call would meet them again."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from slotd.daemon.memory import DeviceLost, OutOfDeviceMemory
from slotd.daemon.models.model import Interrupted


class OnDevice(Protocol):
    """What computes on a device."""

    def device_is_broken(self) -> bool:
        """Whether nothing can be computed any more."""
        ...


S = TypeVar("S", bound=OnDevice)
P = ParamSpec("P")
T = TypeVar("T")


def errors_that_stick(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A failure after which the context is gone is DeviceLost, whatever it said."""

    @wraps(method)
    def guarded(runner: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(runner, *args, **kwargs)
        except (OutOfDeviceMemory, Interrupted):
            raise
        except Exception as error:
            if not runner.device_is_broken():
                raise
            reason = f"{type(error).__name__}: {error}"
        raise DeviceLost(reason)

    return guarded
