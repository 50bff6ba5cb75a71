"""What the CPU platform is made of; loaded by vLLM only when `OMNI_ROLLOUT_CPU=1`."""
