"""slotd.daemon owns the device: it loads a model and serves token ids over the line protocol.

May import `slotd.protocol`, never `slotd.client`. Layers, each importing only what stands to its right:
cli -> loop -> handlers -> scheduler -> engine -> models, kv -> ops -> memory.
"""
