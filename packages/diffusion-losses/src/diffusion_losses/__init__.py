"""Advantages and losses of diffusion reinforcement learning: policy-gradient and forward-process, torch only."""
