"""A fingerprint of the frozen base, so that an adapter cannot land on weights it was not trained on.

It hashes every parameter's name and shape and a few elements of each, at fixed places, rounded to bfloat16 so that a float32
trainer and a bfloat16 sampler of the same checkpoint agree. Sharded parameters give the elements they own and one all-reduce
joins them: the base is never gathered.
"""

from __future__ import annotations

import json

import torch
import xxhash
from torch import Tensor, nn

from .errors import WrongBaseError
from .host import byte_view
from .layers import base_parameters, is_sharded, local, local_slices, reshard

SAMPLES = 16


def fingerprint(module: nn.Module) -> str:
    """`"base:<32 hex>"`; equal before and after adapters are added, and across dtypes of one checkpoint.

    Under FSDP2 this is a collective: every rank calls it.
    """
    reshard(module)
    parameters = base_parameters(module)
    names = sorted(parameters)
    values = torch.cat([_samples(parameters[name]).float() for name in names]) if names else torch.empty(0)
    sharded = next((parameters[name] for name in names if is_sharded(parameters[name])), None)
    if sharded is not None:
        import torch.distributed as dist

        for dim in range(sharded.device_mesh.ndim):  # type: ignore[attr-defined]
            dist.all_reduce(values, group=sharded.device_mesh.get_group(dim))  # type: ignore[attr-defined]
    shapes = json.dumps([[name, list(parameters[name].shape)] for name in names])
    digest = xxhash.xxh3_128(shapes.encode())
    digest.update(byte_view(values.cpu().to(torch.bfloat16)))
    return "base:" + digest.hexdigest()


def check_base(module: nn.Module, expected: str | None) -> None:
    """Raise `WrongBaseError` unless the module's `fingerprint` is the expected one; None expects nothing."""
    if expected is not None and (found := fingerprint(module)) != expected:
        raise WrongBaseError(
            f"the adapter was trained on {expected}, this {type(module).__name__} is {found}. Load the base checkpoint that "
            "the trainer started from."
        )


def _samples(parameter: Tensor) -> Tensor:
    """The sampled elements; zeros where another rank owns the element. [min(SAMPLES, numel)], bfloat16 on the device."""
    count = min(SAMPLES, parameter.numel())
    flat = torch.linspace(0, parameter.numel() - 1, count, dtype=torch.float64).round().long()
    own = local(parameter)
    places = torch.stack(torch.unravel_index(flat, tuple(parameter.shape))) if parameter.ndim else flat[None]
    if not is_sharded(parameter):
        return own.reshape(-1)[flat.to(own.device)].to(torch.bfloat16)
    bounds = local_slices(parameter)
    starts = torch.tensor([bound.start for bound in bounds])[:, None]
    sizes = torch.tensor([bound.stop - bound.start for bound in bounds])[:, None]
    inside = ((places >= starts) & (places < starts + sizes)).all(0)
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    if any(coordinate[dim] for dim, placement in enumerate(placements) if placement.is_replicate()):
        inside &= False  # a replica would be summed once per copy
    out = torch.zeros(count, dtype=torch.bfloat16, device=own.device)
    if inside.any():
        index = tuple((places - starts)[:, inside].to(own.device))
        out[inside.to(own.device)] = own[index].to(torch.bfloat16)
    return out
