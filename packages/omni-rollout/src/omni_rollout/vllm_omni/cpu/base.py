"""vLLM's CPU platform on a wheel that was built for CUDA and therefore has no CPU kernels."""

from vllm.platforms.cpu import CpuPlatform


class CudaWheelCpuPlatform(CpuPlatform):
    """vLLM's own CPU platform; plain torch does what its compiled kernels would do."""

    @classmethod
    def import_kernels(cls) -> None:
        """Nothing to import: the CPU extension is not part of the CUDA wheel."""
