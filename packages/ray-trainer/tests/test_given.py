"""Pictures that come with prompts: every line that cannot be used is named before anything starts."""

import json
import struct
import zlib

import dpo_online.cli
import numpy as np
import pytest
import torch
from image_rewards import prompt_files
from PIL import Image
from ray_trainer import given
from ray_trainer.cli import parse, run
from ray_trainer.errors import TrainerError
from ray_trainer.given import Finished, read_finished
from ray_trainer.prompts import load_prompts
from ray_trainer.validate import validate_config
from run_report.video import read_video, video_size, write_video
from safetensors.torch import save_file


def picture(file, width=64, height=64):
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)).save(file)


def check(folder, rows, *more, recipe="offline_dpo"):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = "data.val_file=builtin:tiny_shapes_heldout"
    arguments = [
        f"recipe={recipe}",
        f"data.train_file={folder}/rows.jsonl",
        held_out,
        f"data.prompts_per_step={len(rows)}",
    ]
    return validate_config(parse(dpo_online.cli.APP, [*arguments, f"trainer.run_dir={folder}/run", *more])[0])


def test_pairs_of_pictures_and_of_latents_are_taken(tmp_path):
    picture(tmp_path / "a.png")
    picture(tmp_path / "b.jpg")
    save_file({"latents": torch.zeros(16, 64)}, tmp_path / "c.safetensors")
    rows = [
        {"prompt": "one", "chosen": "a.png", "rejected": str(tmp_path / "b.jpg")},
        {"prompt": "two", "chosen": "c.safetensors", "rejected": "a.png"},
    ]
    assert "2 steps of 2 prompts x 2 given = 4 samples, 1 update(s) each" in check(
        tmp_path, rows, "trainer.total_steps=2"
    )
    named = [{"text": "one", "file_name": "a.png"}]  # as the `datasets` library's image folders have it
    assert any("x 1 given = 1 samples" in line for line in check(tmp_path, named, recipe="sft"))
    assert read_finished(tmp_path / "a.png").shape == (3, 64, 64)
    assert read_finished(tmp_path / "c.safetensors").dtype == torch.float32


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"chosen": "a.png"}, 'line 2 needs "chosen" and "rejected"'),
        ({"chosen": "a.png", "rejected": 3}, "line 2 needs"),
        ({"chosen": "a.png", "rejected": "gone.png"}, "line 2: .*gone.png is not there"),
        ({"chosen": "a.png", "rejected": "wide.png"}, "line 2: .*wide.png has 96x64 pixels, and .* are 64x64"),
        ({"chosen": "a.png", "rejected": "text.png"}, "line 2: .*text.png cannot be read"),
        ({"chosen": "a.png", "rejected": "half.png"}, "line 2: .*half.png cannot be read"),
        (
            {"chosen": "a.png", "rejected": "few.safetensors"},
            r"line 2: .* holds latents \(4, 64\), and .* need \(16, 64\)",
        ),
        ({"chosen": "a.png", "rejected": "two.safetensors"}, "line 2: .* it holds 2 tensors"),
        ({"chosen": "a.png", "rejected": "text.safetensors"}, "line 2: .* cannot be read"),
        (
            {"chosen": "a.png", "rejected": "film.mp4"},
            "line 2: .*film.mp4 is a video, and rollout.pipeline.num_frames is 1",
        ),
        ({"chosen": "a.png", "rejected": "vector.png"}, "line 2: .*vector.png cannot be read"),
        ({"chosen": "a.png", "rejected": "bomb.png"}, "line 2: .*bomb.png cannot be read: .*decompression bomb"),
        ({"chosen": "a.png", "rejected": "../a.png"}, "line 2: rejected='../a.png' lies outside of"),
        ({"chosen": "a.png", "rejected": "link.png"}, "line 2: rejected='link.png' lies outside of"),
        ({"chosen": "/etc/a.png", "rejected": "a.png"}, "line 2: chosen='/etc/a.png' lies outside of"),
    ],
)
def test_a_bad_line_is_named(row, words, tmp_path):
    picture(tmp_path / "a.png")
    picture(tmp_path / "wide.png", width=96)
    for name in ("text.png", "text.safetensors", "film.mp4"):
        (tmp_path / name).write_text("not at all")
    (tmp_path / "link.png").symlink_to("/etc/hostname")
    Image.new("RGB", (64, 64)).save(tmp_path / "vector.png", "EPS")  # PIL would start Ghostscript for it
    header = bytearray((tmp_path / "a.png").read_bytes())
    header[16:24] = struct.pack(">II", 30_000, 30_000)
    header[29:33] = struct.pack(">I", zlib.crc32(header[12:29]))
    (tmp_path / "bomb.png").write_bytes(header)
    (tmp_path / "half.png").write_bytes((tmp_path / "a.png").read_bytes()[:400])
    save_file({"latents": torch.zeros(4, 64)}, tmp_path / "few.safetensors")
    save_file({"a": torch.zeros(16, 64), "b": torch.zeros(1)}, tmp_path / "two.safetensors")
    good = {"prompt": "good", "chosen": "a.png", "rejected": "a.png"}
    with pytest.raises(TrainerError, match=words):
        check(tmp_path, [good, {"prompt": "bad", **row}])
    assert not (tmp_path / "run").exists()
    if row.get("rejected") in ("vector.png", "bomb.png"):  # and one that came there after the check
        with pytest.raises(TrainerError, match="cannot be read"):
            read_finished(tmp_path / row["rejected"])


def test_paths_of_a_saved_data_set_count_from_its_own_folder(monkeypatch, tmp_path):
    (tmp_path / "set").mkdir()
    row = prompt_files.PromptRow(tmp_path / "set", 1, "one", metadata={"image": "a.png"}, unit="row")
    monkeypatch.setattr(prompt_files, "read_prompts", lambda _: [row])
    assert given.finished_files(load_prompts("set")[0], paired=False) == [tmp_path / "set" / "a.png"]


def test_bad_lines_are_counted(tmp_path):
    with pytest.raises(TrainerError, match="line 1 .*line 2 .*line 3 .*and 2 more lines"):
        check(tmp_path, [{"prompt": str(i)} for i in range(5)])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["actor.diffusion_loss.loss_mode=awm"], "samples that were drawn and scored"),
        (["data.offline=false", "actor.diffusion_loss.loss_mode=sft"], "set data.offline=true"),
        (
            ["algorithm.pair_ties=keep", "algorithm.pair_margin=1"],
            "it goes with pair_mode=best_worst and pair_margin=0",
        ),
        (["trainer.staleness=1"], "nothing is drawn"),
        (
            ["data.train_file=builtin:tiny_shapes_train"],
            "give data.train_file=FILE, each line with prompt, chosen and rejected",
        ),
        (["rollout.n=8"], "rollout.n=8 with data.offline=true: nothing is drawn .*; set rollout.n=1"),
        (["rollout.rollout_adapter=reference"], "set rollout.rollout_adapter=default"),
        (["algorithm.pair_margin=0.1"], "set algorithm.pair_margin=0.0"),
        (["algorithm.flat_groups=drop"], "set algorithm.flat_groups=keep"),
        (["algorithm.advantage_std=batch"], "set algorithm.advantage_std=group"),
        (["rollout.num_replicas=2"], "encode the pictures themselves"),
    ],
)
def test_what_does_not_go_together_is_refused(wrong, words, tmp_path):
    picture(tmp_path / "a.png")
    rows = [{"prompt": "one", "chosen": "a.png", "rejected": "a.png"}]
    with pytest.raises(TrainerError, match=words):
        check(tmp_path, rows, *wrong)


def test_a_file_is_encoded_once_as_long_as_there_is_room(tmp_path, monkeypatch):
    for name in ("a.png", "b.png"):
        picture(tmp_path / name)
    save_file({"latents": torch.ones(16, 64)}, tmp_path / "c.safetensors")
    asked = []

    def encode(pixels):
        asked.append(len(pixels))
        return [torch.full((16, 64), float(one.float().mean())) for one in pixels]

    a, b, c = (str(tmp_path / name) for name in ("a.png", "b.png", "c.safetensors"))
    finished = Finished(1, encode)
    first, second = finished.latents([a, b, c, a]), finished.latents([c, b, a])
    assert asked == [2]
    assert [one.mean() for one in second] == [first[2].mean(), first[1].mean(), first[0].mean()]
    monkeypatch.setattr(given, "CACHE", 16 * 64 * 4)
    asked.clear()
    small = Finished(1, encode)
    assert [len(small.latents([a, b])) for _ in range(2)] == [2, 2]
    assert asked == [2, 1]  # room for one of them


def test_a_video_file_holds_what_was_written(tmp_path):
    ramp = np.linspace(0, 255, 33, dtype=np.uint8)[None, None, None, :]
    frames = np.broadcast_to(ramp, (5, 3, 24, 33)) // np.arange(1, 6, dtype=np.uint8)[:, None, None, None]
    write_video(tmp_path / "film.mp4", frames)
    assert video_size(tmp_path / "film.mp4") == (34, 24, 5)
    back = read_video(tmp_path / "film.mp4", 5)[..., :33]
    assert np.abs(back.astype(int) - frames).mean() < 3
    with pytest.raises(ValueError, match="it has 5 frames, and 9 are needed"):
        read_video(tmp_path / "film.mp4", 9)


def test_a_plan_draws_nothing(tmp_path, capsys):
    picture(tmp_path / "a.png")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one", "image": "a.png"}\n' * 2)
    keys = ["data.val_file=builtin:tiny_shapes_heldout", "data.prompts_per_step=2"]
    assert run(dpo_online.cli.APP, ["plan", "recipe=sft", f"data.train_file={tmp_path}/rows.jsonl", *keys]) == 0
    said = capsys.readouterr().out
    assert "of 2 samples" in said
    assert "  rollout  " not in said
