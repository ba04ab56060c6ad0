"""slotd.daemon.weights: model files. GGUF container, table of architectures, block types, identity.

Imports `slotd.protocol`, numpy and gguf; nothing else of the daemon.
"""
