"""Samplers of diffusion reinforcement learning: sigma grids, SDE and ODE steps, log-probabilities, windows and replay."""
