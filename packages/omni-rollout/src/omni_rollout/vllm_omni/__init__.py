"""The vLLM-Omni backend (extra `vllm`). Importing this package imports neither vllm nor vllm_omni."""
