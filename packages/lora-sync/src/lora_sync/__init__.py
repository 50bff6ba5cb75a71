"""Move a LoRA from the trainer to the sampler, and prove that it arrived."""
