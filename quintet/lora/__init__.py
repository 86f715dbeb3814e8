"""LoRA adapters as people publish them: what a request names, and PEFT's files read and checked; knows no model."""
