"""Rollout of diffusion policies: vLLM-Omni replicas, an embedded diffusers backend, one agent loop."""
