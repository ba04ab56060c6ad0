"""Device memory: the ledger, its pool, failures on purpose, and what is given up under pressure."""

from slotd.daemon.memory.faults import Faults
from slotd.daemon.memory.ledger import SITES, TAGS, DeviceMemory, OutOfDeviceMemory
from slotd.daemon.memory.pressure import Policy

__all__ = ["SITES", "TAGS", "DeviceMemory", "Faults", "OutOfDeviceMemory", "Policy"]
