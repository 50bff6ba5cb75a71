"""Train any diffusers transformer with LoRA or in full under FSDP2, in one process or many."""
