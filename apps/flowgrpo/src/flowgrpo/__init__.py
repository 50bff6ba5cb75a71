"""FlowGRPO and its family: policy-gradient post-training of diffusion models."""
