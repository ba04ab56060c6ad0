"""``python -m slotd.client``: the same as the `slotd` command."""

from slotd.client.cli import main

main()
