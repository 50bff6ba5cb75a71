"""A training loop that ends by the clock, with the whole step as one CUDA graph where there is a GPU.

A step of a network this small is bounded by launches, not by arithmetic; replaying one graph is about ten times faster than
running it eagerly. Everything inside the step must then live on the device: batches, noise, learning rate, loss average.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Recipe:
    """What the optimizer needs. `warmup` counts steps; the learning rate then falls as a cosine over the seconds."""

    learning_rate: float
    betas: tuple[float, float]
    weight_decay: float
    warmup: int


@dataclass(frozen=True)
class TrainingLog:
    """What a loop leaves for the record."""

    steps: int
    seconds: float
    graphed: bool
    losses: list[float]


def train(
    name: str,
    parameters: Iterable[nn.Parameter],
    loss_of_batch: Callable[[], Tensor],
    recipe: Recipe,
    seconds: float,
    after_step: Callable[[], None] | None = None,
    at_progress: dict[float, Callable[[], None]] | None = None,
    report_s: float = 20.0,
) -> TrainingLog:
    """Minimise the first entry of `loss_of_batch()` (a vector: loss, then parts to report) for so many seconds.

    `after_step` runs inside each step (inside the graph), `at_progress` once when that share of the time is over.
    """
    trained = list(parameters)
    device = trained[0].device
    average = torch.zeros_like(loss_of_batch().detach())
    optimizer = _optimizer(trained, recipe)

    def step(zero: bool = True) -> None:
        losses = loss_of_batch()
        if zero:
            optimizer.zero_grad(set_to_none=True)
        losses[0].backward()
        nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        optimizer.step()
        with torch.no_grad():
            average.lerp_(losses.detach(), 0.02)
        if after_step is not None:
            after_step()

    run, graphed = _captured(step, optimizer) if device.type == "cuda" else (step, False)
    pending = sorted((at_progress or {}).items())
    start = last_report = time.monotonic()
    steps = 0
    while (progress := (time.monotonic() - start) / seconds) < 1:
        if steps % 10 == 0:
            warm = min(1.0, (steps + 1) / recipe.warmup)
            _set_rate(optimizer, recipe.learning_rate * (warm * (0.5 + 0.5 * math.cos(math.pi * progress)) + 0.01))
        run()
        steps += 1
        if device.type == "cuda" and steps % 20 == 0:
            torch.cuda.synchronize()  # so that the clock sees finished steps, not queued ones
        while pending and progress >= pending[0][0]:
            pending.pop(0)[1]()
        if time.monotonic() - last_report > report_s:
            last_report = time.monotonic()
            print(f"  {name} step {steps}, {last_report - start:.0f} s, losses {_rounded(average)}", flush=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
    log = TrainingLog(steps, time.monotonic() - start, graphed, _rounded(average))
    kind = "one CUDA graph a step" if graphed else "eager"
    print(f"{name}: {steps} steps in {log.seconds:.0f} s ({kind}), losses {log.losses}", flush=True)
    return log


def reached(parameters: Iterable[nn.Parameter], loss_of_batch: Callable[[], Tensor]) -> list[nn.Parameter]:
    """The parameters that get a gradient from a batch. Weights for more than one frame get none from pictures; an
    optimizer that held them would break a captured step."""
    found = list(parameters)
    loss_of_batch()[0].backward()
    touched = [parameter for parameter in found if parameter.grad is not None]
    for parameter in found:
        parameter.grad = None
    return touched


def _optimizer(parameters: list[nn.Parameter], recipe: Recipe) -> torch.optim.AdamW:
    if parameters[0].device.type != "cuda":
        return torch.optim.AdamW(
            parameters, lr=recipe.learning_rate, betas=recipe.betas, weight_decay=recipe.weight_decay
        )
    rate = torch.tensor(recipe.learning_rate, device=parameters[0].device)  # a tensor, so that a graph reads it anew
    return torch.optim.AdamW(
        parameters, lr=rate, betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True, capturable=True
    )


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _captured(step: Callable[..., None], optimizer: torch.optim.Optimizer) -> tuple[Callable[[], None], bool]:
    """The step as a graph replay; the eager step, with a word why, where capture fails."""
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(5):
                step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        optimizer.zero_grad(set_to_none=True)  # gradients are then allocated inside the graph's own memory
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(zero=False)
        torch.cuda.synchronize()
        return graph.replay, True
    except RuntimeError as error:
        print(f"  CUDA graph capture failed, running eagerly: {error!r}"[:400], flush=True)
        torch.cuda.synchronize()
        return step, False


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 5) for value in values.tolist()]
