"""Device memory: the ledger, its pool, and failures on purpose."""

from slotd.daemon.memory.faults import Faults
from slotd.daemon.memory.ledger import SITES, TAGS, DeviceMemory, OutOfDeviceMemory

__all__ = ["SITES", "TAGS", "DeviceMemory", "Faults", "OutOfDeviceMemory"]
