"""Version numbers; imports nothing, so that the build can read it without installing anything."""

__version__ = "0.1.0"

#: Highest line-protocol version this package speaks. Version 1 is the source daemon's.
PROTOCOL_VERSION = 2
