"""`export RUN --to diffusers|peft|comfyui|merged [--out FOLDER]`: what a run trained, in the form that another tool loads.

diffusers, peft, comfyui    the LoRA, in that tool's names
merged                      a whole pipeline folder whose transformer has the LoRA in its weights

What was written is loaded again by the library that it is for, and compared layer by layer, before this says done. A model card
(README.md), the run's config and pictures before and after lie beside it. The folder is RUN-FORMAT unless --out names one.
"""

from __future__ import annotations

import argparse
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..config import RunConfig
from ..errors import TrainerError
from ..model_folder import transformers
from ..models import check_present, fetch
from ..output import quiet_libraries
from ..resume import flat
from ..values import free, read_yaml
from .report import run_config, run_folder

if TYPE_CHECKING:
    from lora_sync import LoRAPayload
    from model_specs.base import ModelSpec

    from ..app import App

FORMATS = ("diffusers", "peft", "comfyui", "merged")
CLOSE = 1e-6
"""Largest difference of a layer's product B·A, relative to its largest element, after the way through a file."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise TrainerError(f"{message}; such as: {self.prog} runs/mine --to {'|'.join(FORMATS)} [--out FOLDER]")


def main(app: App, arguments: list[str]) -> int:
    """Write, load again, compare; print what was proved."""
    parser = _Parser(f"{app.name} export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--to", required=True, choices=FORMATS)
    parser.add_argument("--out", type=Path)
    if {"-h", "--help"} & set(arguments):
        print(parser.format_help())
        return 0
    given = parser.parse_args(arguments)
    run = run_folder([given.run])
    out = (given.out or run.with_name(f"{run.name}-{given.to}")).expanduser()
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise TrainerError(
            f"--out {str(out)!r} is there already and not empty; move it away, or give another --out FOLDER"
        )
    print("\n".join(export(app, run, given.to, out)))
    return 0


def export(app: App, run: Path, to: str, out: Path) -> list[str]:
    """Write `out`; returns what to tell a person.

    Raises:
        TrainerError: what was trained cannot be exported so, or does not read back the same.
    """
    from lora_sync import LoRASyncError, load_any
    from lora_sync import export as write
    from model_specs import get_spec_for

    config = run_config(app, run)
    source = adapter_of(run)
    folder = check_present(config.model.path, fetch(config.model.path))
    quiet_libraries()
    spec = get_spec_for(folder, config.model.architecture)
    try:
        payload, _ = load_any(source, architecture=spec.lora_names)
        if to == "merged":
            said = _merged(spec, folder, payload, out)
        else:
            name = out if to != "comfyui" else out / f"{run.name}.safetensors"
            file = write(payload, {"comfyui": "comfy"}.get(to, to), name, architecture=spec.lora_names)
            said = f"{file}: {_read_back(spec, folder, payload, file, to)}"
    except LoRASyncError as error:
        raise TrainerError(f"{source}: {error}") from error
    _card(run, config, spec, to, out)
    return [said, f"model card {out / 'README.md'}"]


def adapter_of(run: Path) -> Path:
    """The folder with a run's LoRA, or with its average where that is what validation drew with (`trainer.val_weights`): what its
    end wrote, else what its newest checkpoint exported.

    Raises:
        TrainerError: the run has none yet.
    """
    written = flat(free(read_yaml(run / "config.yaml", "config.yaml"), "config.yaml", "the run folder"))
    name = "lora_ema" if written.get("trainer.val_weights") == "ema" else "lora"
    for folder in (run, *sorted(run.glob("checkpoints/step_*"), reverse=True)):
        if (folder / name).is_dir():
            return folder / name
    if (run / "transformer").is_dir():
        raise TrainerError(
            f"{str(run)!r} trained all weights, so it has no LoRA to convert: {str(run / 'transformer')!r} is a whole transformer, "
            "which diffusers' from_pretrained loads"
        )
    raise TrainerError(
        f"{str(run)!r} has no LoRA yet (no {name}/ in it): let it end (trainer.on_existing=resume), or train with "
        "actor.checkpoint.save_contents=[model,optimizer,extra,lora]"
    )


def _products(payload: LoRAPayload) -> dict[str, Any]:
    """scale · B·A of each layer, fp32."""
    return {
        name: payload.alpha_of(name) / payload.rank_of(name)
        * (payload.tensors[f"{name}.lora_B.weight"].float() @ payload.tensors[f"{name}.lora_A.weight"].float())
        for name in payload.modules
    }  # fmt: skip


def _read_back(spec: ModelSpec, folder: Path, payload: LoRAPayload, file: Path, to: str) -> str:
    """Load the adapter with the library that it is for, onto the base, and compare every layer's product."""
    import diffusers

    experts = [name for name in payload.modules if name.startswith("transformer_2.")]
    if experts:
        return "written and read back by lora_sync; two experts in two files are not loaded again by the library"
    base = spec.load_transformer(folder)
    if to == "peft":
        from peft import PeftModel

        loaded: Any = PeftModel.from_pretrained(base, str(file.parent)).base_model.model
        name = "default"
    else:
        pipeline, name = getattr(diffusers, spec.pipeline_class), "read_back"
        try:
            state, metadata = pipeline.lora_state_dict(str(file), return_lora_metadata=True)
        except (ValueError, KeyError) as error:
            if to == "comfyui":
                return f"written and read back by lora_sync; diffusers has no reader for it ({error})"
            raise
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            base.load_lora_adapter(state, prefix="transformer", metadata=metadata, adapter_name=name)  # type: ignore[operator]
        loaded = base
    expected, seen = _products(payload), set()
    for layer, module in loaded.named_modules():
        if not hasattr(module, "lora_A") or name not in module.lora_A:
            continue
        found = module.scaling[name] * (module.lora_B[name].weight.float() @ module.lora_A[name].weight.float())
        if layer not in expected:
            raise TrainerError(f"{file}: {to} put a LoRA on {layer}, which was not trained; please report this")
        _same(found, expected[layer], f"{file}: {layer}")
        seen.add(layer)
    if lost := sorted(set(expected) - seen):
        raise TrainerError(f"{file}: {to} bound {len(seen)} of {len(expected)} layers; {lost[0]} is missing")
    return f"loaded again by {'peft' if to == 'peft' else 'diffusers'}, {len(seen)} layers the same"


def _same(found: Any, expected: Any, what: str, close: float = CLOSE) -> None:
    most = float(expected.abs().max()) or 1.0
    off = float((found.detach() - expected.detach()).abs().max())
    if not off <= close * most:
        raise TrainerError(f"{what} reads back {off:.2e} away from what was trained, of {most:.2e}; nothing is done")


def _merged(spec: ModelSpec, folder: Path, payload: LoRAPayload, out: Path) -> str:
    """The pipeline folder with W + scale·B·A, in the dtype that its weights are stored in; loaded again by diffusers."""
    import diffusers
    import torch
    from safetensors import safe_open

    named = transformers(folder)
    if len(named) > 1:
        raise TrainerError(
            f"{folder} has {len(named)} experts, and --to merged knows one transformer; use --to diffusers"
        )
    file = next((folder / "transformer").glob("*.safetensors"))
    with safe_open(file, framework="pt") as opened:
        dtype = opened.get_tensor(next(iter(opened.keys()))).dtype
    module, products = spec.load_transformer(folder), _products(payload)
    weights: dict[str, torch.Tensor] = dict(module.named_parameters())
    expected = {}
    with torch.no_grad():
        for layer, product in products.items():
            weight = weights[f"{layer}.weight"]
            weight.add_(product)
            expected[layer] = weight.to(dtype)
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("transformer", ".*"), dirs_exist_ok=True)
    module.to(dtype).save_pretrained(out / "transformer")  # type: ignore[operator]
    again = getattr(diffusers, spec.pipeline_class).from_pretrained(out).transformer
    found = dict(again.named_parameters())
    for layer, weight in expected.items():
        _same(found[f"{layer}.weight"].float(), weight.float(), f"{out}: {layer}", 0.0)
    kind = str(dtype).removeprefix("torch.")
    return f"{out}: loaded again by diffusers, {len(expected)} layers with the LoRA in their weights, {kind}"


def _card(run: Path, config: RunConfig, spec: ModelSpec, to: str, out: Path) -> None:
    """README.md, config.yaml and the pictures of the first and the last validation."""
    from run_report import comparable, compare, load_changes, load_validations

    from ..report import differences_to_recipe

    shutil.copy(run / "config.yaml", out / "config.yaml")
    validations = comparable(load_validations(run), load_changes(run))
    base = "" if Path(config.model.path).exists() or ":" in config.model.path else f"base_model: {config.model.path}\n"
    kind = "text-to-video" if config.rollout.pipeline.num_frames > 1 else "text-to-image"
    tags = f"tags: [{'merged' if to == 'merged' else 'lora'}, reinforcement-learning, {config.actor.diffusion_loss.loss_mode}]\n"
    library = {"peft": "peft"}.get(to, "diffusers")
    lines = ["---", f"{base}library_name: {library}\npipeline_tag: {kind}\n{tags}---", "", f"# {run.name}", ""]
    trained = (
        f"rank {config.model.lora_rank}, alpha {config.model.lora_alpha}" if config.model.lora_rank else "all weights"
    )
    if config.val_adapter == "ema":
        trained += f", averaged (decay {config.actor.fsdp_config.ema_decay:g})"
    loss = config.actor.diffusion_loss.loss_mode
    rewards = ", ".join(f"`{one.name}`" for one in config.reward.each.values())
    lines += [
        f"{spec.pipeline_class}, trained by `{config.app}` (recipe `{config.recipe}`, loss `{loss}`) for the reward "
        f"{rewards}: {trained}. The whole config is in `config.yaml`.",
        "",
        "```python",
        *_usage(spec, config, to, run),
        "```",
        "",
    ]
    if len(validations) > 1:
        first, last = validations[0], validations[-1]
        lines += [
            f"## Measured: step {first.step} → {last.step}, {last.rows} held-out prompts × {last.columns} seeds",
            "",
            "| | before | after | difference, paired |",
            "|---|---|---|---|",
        ]
        lines += [f"| {c.name} | {c.before} | {c.after} | {c.gain} |" for c in compare(first, last)]
        lines += [
            "",
            "± is one standard error, clustered by prompt. A row of a picture is a prompt, a column a seed.",
            "",
        ]
        for name, validation in (("before", first), ("after", last)):
            shutil.copy(validation.folder / "grid.png", out / f"{name}.png")
            lines.append(f"![{name}]({name}.png)")
        lines.append("")
    if changed := differences_to_recipe(run):
        lines += [
            "## Other than the recipe",
            "",
            *(f"- `{key}`: {before} → {after}" for key, before, after in changed),
            "",
        ]
    (out / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _usage(spec: ModelSpec, config: RunConfig, to: str, run: Path) -> list[str]:
    model = repr("THIS FOLDER" if to == "merged" else config.model.path)
    lines = [
        f"from diffusers import {spec.pipeline_class}",
        "",
        f"pipe = {spec.pipeline_class}.from_pretrained({model})",
    ]
    if to == "peft":
        lines[:0] = ["from peft import PeftModel"]
        lines.append('pipe.transformer = PeftModel.from_pretrained(pipe.transformer, "THIS FOLDER")')
    elif to != "merged":
        name = f', weight_name="{run.name}.safetensors"' if to == "comfyui" else ""
        lines.append(f'pipe.load_lora_weights("THIS FOLDER"{name})')
    drawn = config.rollout.val_kwargs.pipeline
    size = f"height={drawn.height}, width={drawn.width}, num_inference_steps={drawn.num_inference_steps}"
    lines.append(f'pipe("a prompt", {size})')
    return lines
