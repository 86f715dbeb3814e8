"""Adapters (LoRA) of an engine: on their way into host memory, and in the slots of the device."""
