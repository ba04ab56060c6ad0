"""Device memory: the ledger, its pool, failures on purpose, and what is given up under pressure."""

from slotd.daemon.memory.device_lost import DeviceLost
from slotd.daemon.memory.faults import Faults
from slotd.daemon.memory.interface import SITES, TAGS, Ledger, OutOfDeviceMemory
from slotd.daemon.memory.ledger import DeviceMemory
from slotd.daemon.memory.pressure import Policy

__all__ = [
    "SITES",
    "TAGS",
    "DeviceLost",
    "DeviceMemory",
    "Faults",
    "Ledger",
    "OutOfDeviceMemory",
    "Policy",
]
