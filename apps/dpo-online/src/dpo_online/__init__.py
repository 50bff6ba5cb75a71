"""Online DPO and its family: forward-process post-training of diffusion models."""
