"""`compare A B [prompts=FILE] [out=FOLDER] [key=value …]`: two adapters on the same prompts and seeds, scores and pictures.

A and B are each a run folder, a LoRA file or folder of any tool, or `base`. Model, held-out prompts, size and reward are those of
the first run folder among them; without one, those of recipe=NAME. Keys change them, such as data.val_max_prompts=8 or
rollout.val_kwargs.n=4. Differences are paired by prompt; ± is one standard error.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import RunConfig
from ..errors import TrainerError
from .report import run_config

if TYPE_CHECKING:
    from lora_sync import LoRAPayload
    from omni_rollout import DiffusersBackend
    from run_report.stats import Change

    from ..app import App
    from ..prompts import Prompt


def main(app: App, arguments: list[str]) -> int:
    """Draw, score, print the table and where the page is."""
    if {"-h", "--help"} & set(arguments):
        print((__doc__ or "").strip())
        return 0
    sides = [a for a in arguments if "=" not in a]
    own = {key: value for key, _, value in (a.partition("=") for a in arguments) if key in ("prompts", "out")}
    keys = [a for a in arguments if "=" in a and a.partition("=")[0] not in own]
    if len(sides) != 2:
        raise TrainerError(
            f"compare takes two adapters and got {len(sides)}; give run folders, LoRA files or base: compare base runs/mine"
        )
    config = _config(app, sides, keys)
    if "prompts" in own:
        config.data.sources, config.data.train_file, config.data.val_file = {}, own["prompts"], own["prompts"]
    out = Path(own.get("out") or f"runs/compare-{'-'.join(_short(side) for side in sides)}").expanduser()
    if (out / "samples").exists():
        raise TrainerError(f"out={str(out)!r} holds a comparison already; move it away, or give another out=FOLDER")
    changes = compare(config, sides, out)
    print(f"{_short(sides[0])} → {_short(sides[1])}, paired by prompt and seed")
    for change in changes:
        print(f"  {change.name:<12} {change.before}  →  {change.after}    {change.gain}")
    print(f"page  {out / 'compare.html'}")
    return 0


def _short(side: str) -> str:
    return Path(side).name or side


def _config(app: App, sides: list[str], keys: list[str]) -> RunConfig:
    """Of the first run folder among the two, else of the recipe."""
    for side in sides:
        if (Path(side).expanduser() / "config.yaml").is_file() and not any(k.startswith("recipe=") for k in keys):
            config = run_config(app, Path(side).expanduser(), keys)
            break
    else:
        from ..app import parse

        found, _ = parse(app, keys)
        assert found is not None
        config = found
    return config


def compare(config: RunConfig, sides: list[str], out: Path) -> list[Change]:
    """Draw both sides and score them; write `out/samples/step_000000` and `step_000001`, and `out/compare.html`.

    Args:
        config: model, prompts, settings and reward.
        sides: run folders, LoRA files, or "base".
        out: folder to make.

    Returns:
        Each measure of both, with the paired difference.
    """
    from run_report import compare as paired
    from run_report import load_validations, save_validation
    from run_report.comparison import write_comparison

    from ..prompts import load_prompt_sets

    payloads = [None if side == "base" else _payload(side, config) for side in sides]
    prompts = load_prompt_sets(config.data)[1][: config.data.val_max_prompts]
    backend = _backend(config)
    for step, payload in enumerate(payloads):
        backend.remove_lora()
        if payload is not None:
            backend.update_lora(payload)
        print(f"drawing {_short(sides[step])}: {len(prompts)} prompts x {config.rollout.val_kwargs.n}", flush=True)
        save_validation(out, step, *_drawn(config, backend, prompts))
    first, second = load_validations(out)
    write_comparison(out, (_short(sides[0]), _short(sides[1])), first, second)
    return paired(first, second)


def _payload(side: str, config: RunConfig) -> LoRAPayload:
    from lora_sync import LoRASyncError, load_any
    from model_specs import get_spec_for

    from ..models import fetch
    from .export import adapter_of

    path = Path(side).expanduser()
    if not path.exists():
        raise TrainerError(f"{side!r} is neither a run folder nor a LoRA file, nor `base`; correct it")
    source = adapter_of(path) if (path / "config.yaml").is_file() and (path / "metrics.jsonl").is_file() else path
    try:
        return load_any(
            source, architecture=get_spec_for(fetch(config.model.path), config.model.architecture).lora_names
        )[0]
    except (LoRASyncError, OSError) as error:
        raise TrainerError(f"{side!r}: {error}") from error


def _backend(config: RunConfig) -> DiffusersBackend:
    """The base, in this process: on the GPU where there is one."""
    import torch
    from omni_rollout import DiffusersBackend

    from ..models import check_present, fetch
    from ..output import quiet_libraries

    device = config.actor.fsdp_config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    folder = check_present(config.model.path, fetch(config.model.path))
    quiet_libraries()
    return DiffusersBackend.from_pretrained(
        str(folder),
        dtype=getattr(torch, config.rollout.dtype),
        device=device,
        max_batch_size=config.rollout.max_batch_size,
    )


def _drawn(config: RunConfig, backend: DiffusersBackend, prompts: list[Prompt]) -> tuple[Any, list[dict[str, Any]]]:
    """Pictures uint8 [N, …] and a record of each."""
    from dataclasses import replace

    from image_rewards import RewardSample, load
    from omni_rollout.samples import SHOWN

    from ..rollouts import requests_of

    rows = [(f"val/{prompt.uid}", prompt) for prompt in prompts]
    requests = [  # what is compared is the backend's one adapter, whichever state the run validates with
        replace(request, adapter="default")
        for request in requests_of(config, rows, config.rollout.val_kwargs.n, step=0, validate=True)
    ]
    drawn = backend.generate(requests)
    pictures = drawn["responses"].numpy()
    sources = [prompt.source for prompt in prompts for _ in range(config.rollout.val_kwargs.n)]
    totals, components = [0.0] * len(requests), [dict[str, float]() for _ in requests]
    for name, reward in config.reward.each.items():
        which = [i for i, source in enumerate(sources) if name in config.rewards_of(source)]
        made = load(reward.name, **reward.options)
        given = drawn[SHOWN[made.inputs]].numpy()
        samples = [
            RewardSample(given[i], r.prompt, dict(r.metadata), uid=r.uid, index=r.index)
            for i, r in ((i, requests[i]) for i in which)
        ]
        for i, result in zip(which, made.score(samples), strict=True):
            totals[i] += result.score * (reward.weight if name else 1.0)
            components[i] |= {f"{name}_{key}" if name else key: value for key, value in result.components.items()}
            if name:
                components[i][name] = result.score
    return pictures, [
        {"prompt": r.prompt, "uid": r.uid, "seed": r.index, "reward": total, "components": parts}
        for r, total, parts in zip(requests, totals, components, strict=True)
    ]
