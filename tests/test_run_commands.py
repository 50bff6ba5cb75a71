"""The commands that take a finished run: what `export` and `compare` write for the run that the other tests made, too."""

import json
import shutil

import pytest
from flowgrpo.cli import APP
from model_specs import get_spec_for
from ray_trainer.app import parse
from ray_trainer.cli import run
from ray_trainer.commands.export import _card, adapter_of
from ray_trainer.config import to_yaml
from ray_trainer.errors import TrainerError
from ray_trainer.models import fetch
from run_report import load_validations


@pytest.mark.parametrize(
    ("to", "file", "by"),
    [
        ("diffusers", "pytorch_lora_weights.safetensors", "loaded again by diffusers, 48 layers the same"),
        ("peft", "adapter_model.safetensors", "loaded again by peft, 48 layers the same"),
        ("comfyui", "run.safetensors", "loaded again by diffusers, 48 layers the same"),
        ("merged", "transformer/diffusion_pytorch_model.safetensors", "48 layers with the LoRA in their weights"),
    ],
)
def test_an_export_is_loaded_again_by_its_library_and_has_a_card(finished_run, tmp_path, capsys, to, file, by):
    folder, _ = finished_run
    out = tmp_path / "out"
    assert run(APP, ["export", str(folder), "--to", to, "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert by in said.out
    assert "Loading" not in said.err  # no bars of the libraries
    assert (out / file).is_file()
    card = (out / "README.md").read_text()
    for part in (
        "pipeline_tag: text-to-image",
        "reward `shapes`",
        "| strict | ",
        "![after](after.png)",
        "recipe `tiny_grpo_guard`",
    ):
        assert part in card
    assert {"before.png", "after.png", "config.yaml"} <= {p.name for p in out.iterdir()}
    assert run(APP, ["export", str(folder), "--to", to, "--out", str(out)]) == 2
    assert "is there already and not empty" in capsys.readouterr().err


def test_a_file_that_does_not_hold_what_was_trained_is_refused(finished_run, tmp_path, capsys, monkeypatch):
    import torch
    from ray_trainer.commands import export

    whole = export._products
    monkeypatch.setattr(
        export, "_products", lambda payload: {k: v + 1e-3 * torch.ones_like(v) for k, v in whole(payload).items()}
    )
    assert run(APP, ["export", str(finished_run[0]), "--to", "peft", "--out", str(tmp_path / "out")]) == 2
    assert "away from what was trained" in capsys.readouterr().err


def test_two_adapters_are_drawn_on_the_same_seeds_and_compared(finished_run, tmp_path, capsys):
    folder, _ = finished_run
    keys = ["data.val_max_prompts=3", "rollout.val_kwargs.n=2"]
    assert run(APP, ["compare", "base", str(folder), f"out={tmp_path / 'one'}", *keys]) == 0
    said = capsys.readouterr().out
    assert "base → run, paired by prompt and seed" in said
    base, trained = load_validations(tmp_path / "one")
    # Its pictures are those of the run's own validations: of the base before training, of the adapter after.
    before, *_, after = load_validations(folder)
    for mine, its in ((base, before), (trained, after)):
        rewards = {(r.prompt, r.seed): r.reward for r in its.records}
        assert [r.reward for r in mine.records] == pytest.approx(
            [rewards[r.prompt, r.seed] for r in mine.records], abs=0.02
        )
    page = (tmp_path / "one" / "compare.html").read_text()
    assert page.count('type="range"') == 1 + 6
    assert "http" not in page.replace("http://www.w3.org", "")
    assert run(APP, ["compare", "base", str(folder), f"out={tmp_path / 'one'}"]) == 2
    assert "holds a comparison already" in capsys.readouterr().err
    # A file of another tool against the run itself, on prompts of one's own: no difference.
    shutil.copy(folder / "lora" / "pytorch_lora_weights.safetensors", tmp_path / "other.safetensors")
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": r.prompt, "metadata": m} for r, m in zip(base.records[::2], METADATA, strict=True)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = [
        "compare",
        str(tmp_path / "other.safetensors"),
        str(folder),
        f"prompts={prompts}",
        f"out={tmp_path / 'two'}",
    ]
    assert run(APP, [*arguments, *keys]) == 0
    assert "+0.000 ± 0.000" in capsys.readouterr().out.split("reward", 1)[1].splitlines()[0]


def test_a_run_that_validates_with_its_average_is_compared_and_exported_by_it(tmp_path, capsys):
    averaged = ["trainer.val_weights=ema", "actor.fsdp_config.ema_decay=0.9"]
    small = ["data.val_max_prompts=1", "rollout.val_kwargs.n=1", "rollout.val_kwargs.pipeline.num_inference_steps=1"]
    assert run(APP, ["compare", "base", "base", f"out={tmp_path / 'same'}", *averaged, *small]) == 0
    assert "+0.000" in capsys.readouterr().out
    folder = tmp_path / "run"
    (folder / "lora").mkdir(parents=True)
    config = parse(APP, averaged)[0]
    (folder / "config.yaml").write_text(to_yaml(config))
    with pytest.raises(TrainerError, match=r"no LoRA yet \(no lora_ema/ in it\)"):
        adapter_of(folder)
    (folder / "lora_ema").mkdir()
    assert adapter_of(folder) == folder / "lora_ema"
    (folder / "config.yaml").write_text(to_yaml(parse(APP, [])[0]))
    assert adapter_of(folder) == folder / "lora"


def test_several_rewards_score_the_prompts_of_their_sources_and_stand_on_the_card(tmp_path):
    file, shapes = "train_file: builtin:tiny_shapes_heldout, val_file: builtin:tiny_shapes_heldout", "name: shapes"
    several = [
        f"reward.several={{a: {{{shapes}}}, b: {{{shapes}}}}}",
        f"data.sources={{one: {{{file}, rewards: [a]}}, two: {{{file}, rewards: [b]}}}}",
    ]
    small = ["data.val_max_prompts=2", "rollout.val_kwargs.n=1", "rollout.val_kwargs.pipeline.num_inference_steps=1"]
    assert run(APP, ["compare", "base", "base", f"out={tmp_path / 'same'}", *several, *small]) == 0
    scored = [set(record.components) & {"a", "b"} for record in load_validations(tmp_path / "same")[0].records]
    assert scored == [{"a"}, {"b"}]  # the sources take turns
    config = parse(APP, several)[0]
    folder = fetch(config.model.path)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    (tmp_path / "out").mkdir()
    _card(tmp_path, config, get_spec_for(folder), "peft", tmp_path / "out")
    assert "for the reward `shapes`, `shapes`: rank 16" in (tmp_path / "out" / "README.md").read_text()


METADATA = [
    {"count": 1, "color": "red", "shape": "triangle", "background": "black"},
    {"count": 1, "color": "green", "shape": "circle", "background": "white"},
    {"count": 1, "color": "green", "shape": "circle", "background": "black"},
]


def test_what_cannot_be_exported_or_compared_is_one_line(finished_run, tmp_path, capsys):
    folder, _ = finished_run
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(folder / "config.yaml", bare / "config.yaml")
    for arguments, said in (
        (["export", str(bare), "--to", "peft"], "has no LoRA yet"),
        (["export", str(folder)], "--to"),
        (["export", str(folder), "--to", "gguf"], "invalid choice: 'gguf'"),
        (["export", str(folder), "--to", "peft", "extra"], "unrecognized arguments: extra"),
        (["export", str(tmp_path / "none"), "--to", "peft"], "no config.yaml in it"),
        (["compare", str(folder)], "takes two adapters and got 1"),
        (["compare", "base", str(tmp_path / "none.safetensors")], "is neither a run folder nor a LoRA file"),
        (["compare", "base", str(folder / "config.yaml")], "config.yaml"),
    ):
        assert run(APP, arguments) == 2, arguments
        error = capsys.readouterr().err
        assert said in error
        assert len(error.splitlines()) == 1
    for command in ("export", "compare"):
        assert run(APP, [command, "--help"]) == 0
