"""What all rewards with a neural network share: loading that checks every weight, and batches that cannot change a score.

Loading    by folder or hub id, from safetensors, without remote code; a checkpoint that leaves a weight at its random start
           is an error. `.pt`/`.pth` files of older releases are read with torch's weights-only unpickler.
Batches    one sample per forward pass by default: a picture's score is then independent of the other pictures, to the bit.
           With batch_size > 1 every pass has one shape (short batches are filled up, texts padded to a fixed length),
           and scores differ by 1e-6 relative in fp32, because kernels add in another order.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .base import Reward, RewardResult, RewardSample
from .errors import RewardConfigError, RewardTargetError, check_counts, missing_extra, require
from .registry import find

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(eq=False, kw_only=True)
class ModelReward(Reward):
    """Base of the rewards that run a network.

    Args:
        device: "cpu", "cuda", "cuda:1", ...
        dtype: of the weights: "float32", "bfloat16" or "float16"; scores are computed in fp32 from the embeddings on
        batch_size: samples per forward pass, always exactly so many; 1 is exact, more is faster on a GPU
        revision: of a hub id
    """

    device: str = "cpu"
    dtype: str = "float32"
    batch_size: int = 1
    revision: str | None = None

    def __post_init__(self) -> None:
        require(self.dtype in DTYPES, f"dtype={self.dtype!r} is unknown. Choose one of {', '.join(DTYPES)}.")
        check_counts(batch_size=self.batch_size)
        self._lock = threading.RLock()
        self._ready, self._asleep = False, False

    def __getstate__(self) -> dict[str, Any]:
        require(
            not self._ready,
            f"{self.name} has its weights loaded and would be copied with them. Hand over name and options instead.",
        )
        return {k: v for k, v in self.__dict__.items() if k != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    def prepare(self) -> None:
        """Load the weights now instead of with the first sample."""
        with self._lock:
            if not self._ready:
                try:
                    import torch  # noqa: F401
                    import transformers  # noqa: F401
                except ImportError as error:
                    name = error.name or "torch"
                    raise missing_extra(name, "models", f"the reward {self.name!r}") from error
                self.load()
                self._ready = True
            elif self._asleep:
                self._move(self.device)
                self._asleep = False

    @contextmanager
    def awake(self) -> Iterator[None]:
        """For forward passes: weights are loaded, and `sleep` waits until the end."""
        with self._lock:
            self.prepare()
            import torch

            with torch.inference_mode():
                yield

    def sleep(self) -> None:
        """The weights go to the CPU, once no forward pass runs."""
        with self._lock:
            if self._ready and not self._asleep and self.device != "cpu":
                import torch

                self._move("cpu")
                self._asleep = True
                torch.cuda.empty_cache()

    def _move(self, device: str) -> None:
        import torch

        for part in vars(self).values():
            if isinstance(part, torch.nn.Module):
                part.to(device)

    @abstractmethod
    def load(self) -> None:
        """Load weights and processors into `self`."""

    @abstractmethod
    def score_batch(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """Score exactly `batch_size` samples in one forward pass."""

    def score_valid(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        results: list[RewardResult] = []
        with self.awake():
            for start in range(0, len(samples), self.batch_size):
                batch = list(samples[start : start + self.batch_size])
                full = batch + [batch[-1]] * (self.batch_size - len(batch))
                results.extend(self.score_batch(full)[: len(batch)])
        return results

    def place(self, model: Any) -> Any:
        """`model` in evaluation mode, on the device, in the dtype, without gradients."""
        import torch

        model = model.eval().requires_grad_(False).to(device=self.device, dtype=getattr(torch, self.dtype))
        for weight in model.parameters():
            # Weights mapped from a file lie where the file has them, and CPU kernels choose by alignment: a copy puts
            # them where every process has them, so that no score depends on which file they came from.
            weight.data = weight.data.clone()
        return model

    def pixels(self, processor: Any, samples: Sequence[RewardSample]) -> torch.Tensor:
        """[B,3,h,w] in dtype, on the device. Each picture is processed alone: processors may group by size."""
        import torch

        rows = [
            processor(images=np.ascontiguousarray(s.image), return_tensors="pt", input_data_format="channels_first")
            for s in samples
        ]
        return torch.cat([row["pixel_values"] for row in rows]).to(device=self.device, dtype=getattr(torch, self.dtype))


def on_gpu(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a reward whose process has a GPU: `device` is "cuda" where the reward is a `ModelReward` and nobody set it."""
    found = find(name)
    if isinstance(found, type) and issubclass(found, ModelReward):
        return {"device": "cuda"} | dict(options)
    return dict(options)


def need_prompt(name: str, prompt: str) -> None:
    """Raise `RewardTargetError` for an empty prompt."""
    require(prompt.strip() != "", f"{name}: there is no prompt to judge the picture by.", RewardTargetError)


def from_pretrained(
    cls: Any, path: str, revision: str | None, *, allowed_missing: Sequence[str] = (), **options: Any
) -> Any:
    """`cls.from_pretrained` from safetensors, refusing checkpoints that do not hold every weight.

    Args:
        allowed_missing: endings of names that may be absent (buffers that are computed)
    """
    try:
        model, info = cls.from_pretrained(
            path, revision=revision, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **options
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise RewardConfigError(
            f"{path!r} could not be loaded as {cls.__name__} from safetensors: {type(error).__name__}: {error}"
        ) from error
    missing = sorted(key for key in info["missing_keys"] if not key.endswith(tuple(allowed_missing) or ("\0",)))
    wrong = sorted(str(key) for key in info.get("mismatched_keys", ()))
    require(
        not (missing or wrong),
        f"{path!r} does not hold all weights of {cls.__name__}: {len(missing)} absent, {len(wrong)} of another shape, "
        f"first {(missing + wrong)[:1]}. A model with random weights would give numbers that mean nothing.",
    )
    return model


def processor_of(cls: Any, path: str, revision: str | None) -> Any:
    """A tokenizer or image processor, without remote code."""
    try:
        return cls.from_pretrained(path, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise RewardConfigError(
            f"{path!r} has no files for {cls.__name__}: {type(error).__name__}: {error}. Name the folder that has them."
        ) from error


def load_state(file: str | Path) -> dict[str, torch.Tensor]:
    """Tensors of a .safetensors, .pt, .pth or .bin file. Never runs code from it."""
    import torch

    path = Path(file)
    require(path.is_file(), f"{str(path)!r} is no file. Give the path of a checkpoint (.safetensors, .pt, .pth).")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # both libraries raise many kinds
        raise RewardConfigError(
            f"{str(path)!r} could not be read as weights only: {type(error).__name__}: {error}"
        ) from error
    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]
    if not isinstance(state, Mapping) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise RewardConfigError(f"{str(path)!r} holds no table of tensors.")
    return dict(state)


def fill(
    module: torch.nn.Module, state: Mapping[str, torch.Tensor], source: str, *, ignore: Sequence[str] = ()
) -> None:
    """Load `state` into `module`; any name or shape that does not fit is an error, except names that contain
    `ignore`."""
    own = module.state_dict()
    given = {k: v for k, v in state.items() if k in own or not any(part in k for part in ignore)}
    missing = sorted(k for k in own if k not in given and not any(part in k for part in ignore))
    extra = sorted(k for k in given if k not in own)
    shapes = sorted(k for k in own if k in given and own[k].shape != given[k].shape)
    if missing or extra or shapes:
        first = (missing + extra + shapes)[0]
        raise RewardConfigError(
            f"{source!r} does not fit {type(module).__name__}: {len(missing)} weights absent, {len(extra)} unknown, "
            f"{len(shapes)} of another shape; first {first!r}."
        )
    module.load_state_dict(given, strict=False)
