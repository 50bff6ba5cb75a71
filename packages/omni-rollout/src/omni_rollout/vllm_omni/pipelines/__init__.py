"""Pipelines of vLLM-Omni that sample as the trainer does. A model's spec names its own; the engine's worker imports it."""
