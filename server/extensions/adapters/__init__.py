"""LoRA adapters that are asked for as models, and that operators load and unload while requests run."""
