"""The loop that diffusion RL programs share: config, prompts, worker groups, steps with hooks, run folder and report."""
