"""Reading tensors out of `model_output` and `data`: one law for shapes and dtypes.

Shapes: B sample, W window step, D latent elements (any number of dims). The *step shape* of a call is [B] or [B, W];
per-step values have it, latent-sized tensors have it followed by D. Nothing is ever broadcast by torch's own rules
between [B, 1] and [B], which is how one public code ends up with a [B, B] ratio.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import LossError

Source = Mapping[str, Any]


def lookup(source: Source, key: str) -> Any:
    """`source[key]` or None; works for a dict and for a TensorDict (which has no `in`), plain values unwrapped."""
    value = source.get(key, None)
    if value is None or isinstance(value, Tensor):
        return value
    return getattr(value, "data", value) if type(value).__name__.startswith("NonTensor") else value


def require(source: Source, key: str, where: str, loss_mode: str, why: str = "") -> Tensor:
    """The tensor at `key`, or a `LossError` that says which loss needs it."""
    value = lookup(source, key)
    if value is None:
        reason = f" ({why})" if why else ""
        raise LossError(f"{where}[{key!r}] is missing; loss_mode={loss_mode!r} needs it{reason}: add it to {where}")
    if not isinstance(value, Tensor):
        raise LossError(f"{where}[{key!r}]={value!r} is not a tensor; give a float tensor")
    return value


def require_full_precision(name: str, tensor: Tensor) -> Tensor:
    """`tensor`, refused unless it is float32 or float64.

    Half precision moves a log-prob by up to 0.15 where clips are 1e-4, so stored trajectories must be fp32.
    """
    if tensor.dtype not in (torch.float32, torch.float64):
        raise LossError(
            f"{name} has dtype {tensor.dtype}; ratios and transition means are only meaningful in float32 or float64: "
            "compute and store them in float32"
        )
    return tensor


def upcast(tensor: Tensor) -> Tensor:
    """Half precision to float32; float32 and float64 stay."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def step_shape(name: str, tensor: Tensor) -> torch.Size:
    """The shape of a per-step tensor, which must be [B] or [B, W] and not empty."""
    if tensor.ndim not in (1, 2) or tensor.numel() == 0:
        raise LossError(f"{name} has shape {tuple(tensor.shape)}; give [B] or [B, W] with at least one element")
    return tensor.shape


def per_step(name: str, value: Tensor | float, shape: torch.Size, like: Tensor) -> Tensor:
    """`value` with exactly the step shape `shape`, on the device of `like`.

    Accepted: a number, a 0-dim tensor, [B], [B, 1], [B, W], each with any number of trailing ones (the [B, 1, 1, 1]
    form that schedulers return). A 1-D tensor is per sample.
    """
    tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=like.dtype)
    tensor = tensor.to(like.device)
    if tensor.ndim == 0:
        return tensor.expand(shape)
    core = tensor
    while core.ndim > len(shape) and core.shape[-1] == 1:
        core = core.squeeze(-1)
    if core.shape == shape:
        return core
    if len(shape) == 2 and core.ndim == 1 and core.shape[0] == shape[0]:
        return core.unsqueeze(1).expand(shape)
    if len(shape) == 2 and core.ndim == 2 and core.shape == (shape[0], 1):
        return core.expand(shape)
    raise LossError(
        f"{name} has shape {tuple(tensor.shape)}, which does not fit the steps of this call, {tuple(shape)}; "
        "give one value per sample [B] or per step [B, W]"
    )


def latent_sized(name: str, tensor: Tensor, shape: torch.Size, like: Tensor | None = None) -> Tensor:
    """`tensor` with shape `shape + D`; a [B, D] tensor is repeated over the steps of a [B, W] call."""
    want = like.shape if like is not None else None
    if want is not None and tensor.shape == want:
        return tensor
    if want is not None and len(shape) == 2 and tensor.shape == (want[0], *want[2:]):
        return tensor.unsqueeze(1).expand(want)
    if want is None and tensor.ndim >= len(shape) and tensor.shape[: len(shape)] == shape:
        return tensor
    expected = tuple(want) if want is not None else (*shape, "...")
    raise LossError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}; give it in the layout of this call")


def element_mean(tensor: Tensor, dims: int, dtype: torch.dtype | None = None) -> Tensor:
    """Mean over all but the first `dims` dims. With none left over the tensor is returned as it is.

    `tensor.mean(dim=())` would average the batch away, a fault seen in public code.
    """
    if tensor.ndim <= dims:
        return tensor if dtype is None else tensor.to(dtype)
    return tensor.flatten(dims).mean(dim=-1, dtype=dtype)


def spread_over(value: Tensor, like: Tensor) -> Tensor:
    """A per-step tensor with trailing ones, ready to multiply a latent-sized one."""
    return value.reshape(*value.shape, *[1] * (like.ndim - value.ndim))


def read_mask(data: Source, shape: torch.Size, like: Tensor) -> Tensor:
    """`data["mask"]` as a bool tensor of the step shape; all True when it is absent."""
    mask = lookup(data, "mask")
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=like.device)
    mask = mask if isinstance(mask, Tensor) else torch.as_tensor(mask)
    if mask.dtype != torch.bool:
        raise LossError(f"data['mask'] has dtype {mask.dtype}; give a bool tensor, True where an element counts")
    return per_step("data['mask']", mask, shape, like)


def refuse_non_finite(mask: Tensor, **tensors: Tensor) -> None:
    """Raise `LossError` for the first counted element that is NaN or infinite. One device synchronisation."""
    bad = {name: ~torch.isfinite(tensor.detach()) & mask for name, tensor in tensors.items()}
    if not torch.stack([flags.any() for flags in bad.values()]).any():
        return
    for name, flags in bad.items():
        if flags.any():
            where = tuple(flags.nonzero()[0].tolist())
            raise LossError(
                f"{name}{list(where)}={tensors[name][where].item()!r} is not finite; mask that element, or "
                "find out why the model or the sampler produced it (an ODE step, or noise_level=0, has no log-prob)"
            )


DETERMINISTIC = (
    "a deterministic step has no density; take that step out of the window, mask it, or use a KL that is not scaled by "
    "the std"
)


def require_above_zero(name: str, value: Tensor, mask: Tensor, why: str = DETERMINISTIC) -> Tensor:
    """`value` with masked elements set to 1; a counted element that is not finite and above zero is refused."""
    bad = ~(torch.isfinite(value) & (value > 0)) & mask
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        raise LossError(f"{name}{list(where)}={value[where].item()!r} must be finite and above zero: {why}")
    return torch.where(mask, value, torch.ones_like(value))
