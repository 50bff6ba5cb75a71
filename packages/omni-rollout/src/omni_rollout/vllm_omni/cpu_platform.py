"""Entry points that let the stock CUDA wheels of vLLM and vLLM-Omni run on a machine without a GPU.

Entry points reach every vLLM in the environment, so both functions return None, which means "not this platform", unless
`OMNI_ROLLOUT_CPU=1` is set. They import nothing: vLLM calls them while it is being imported itself. What they name lives
in the subpackage `cpu`, and no installed file is edited.
"""

import os


def enabled() -> bool:
    """Whether this process asked for the CPU platform."""
    return os.environ.get("OMNI_ROLLOUT_CPU") == "1"


def vllm_platform() -> str | None:
    """For the group `vllm.platform_plugins`: the class that vLLM itself uses."""
    return "omni_rollout.vllm_omni.cpu.base.CudaWheelCpuPlatform" if enabled() else None


def omni_platform() -> str | None:
    """For the group `vllm_omni.platform_plugins`: the class that vLLM-Omni uses."""
    return "omni_rollout.vllm_omni.cpu.platform.CpuOmniPlatform" if enabled() else None
