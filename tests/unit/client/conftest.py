"""A scripted daemon, and clients attached to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slotd.client import Client
from tests.fakes.fake_daemon import FakeDaemon


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with FakeDaemon() as daemon:
        yield daemon


@pytest.fixture
def client(daemon: FakeDaemon, tiny_llama: Path) -> Iterator[Client]:
    with Client.attach(daemon.stdin, daemon.stdout, model=tiny_llama, reply_timeout=5) as client:
        yield client


@pytest.fixture
def impatient(daemon: FakeDaemon, tiny_llama: Path) -> Iterator[Client]:
    """A client that looks into silence after 0.1 s."""
    with Client.attach(daemon.stdin, daemon.stdout, model=tiny_llama, reply_timeout=0.1) as client:
        yield client
