"""The command line, the contact sheet and reading folders."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from image_rewards import RewardConfigError, RewardResult, RewardSample
from image_rewards.cli import main, options_of, parser
from image_rewards.prompt_files import held_out, read_prompts
from image_rewards.sheet import by_score, contact_sheet
from image_rewards.wire import encode_png
from PIL import Image


@pytest.fixture
def folder(tmp_path, scenes):
    """Eight pictures with their metadata beside them, and four that are damaged or odd."""
    for i, (picture, truth) in enumerate(scenes(8)):
        (tmp_path / f"{i}.png").write_bytes(encode_png(picture))
        asked = truth if i % 2 else {**truth, "count": truth["count"] % 4 + 1}
        (tmp_path / f"{i}.json").write_text(json.dumps({"prompt": f"<b>scene & {i}</b>", "metadata": asked}))
    return tmp_path


def test_score_a_folder(folder, tmp_path, capsys):
    out, sheet = tmp_path / "results.jsonl", tmp_path / "sheet.html"
    assert main(["score", "--reward", "shapes", str(folder), "--out", str(out), "--html", str(sheet)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["image"] for row in rows] == [f"{i}.png" for i in range(8)]
    assert [row["score"] == 1.0 for row in rows] == [bool(i % 2) for i in range(8)]
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 9
    assert printed[1].split()[1] == "1.png"  # best first
    page = sheet.read_text()
    assert page.count("<figure>") == 8
    assert "<b>scene" not in page
    assert "&lt;b&gt;scene &amp; 1" in page
    assert page.index("scene &amp; 1&lt;") < page.index("scene &amp; 0&lt;")


def test_damaged_pictures_are_listed_not_hidden(folder, tmp_path, capsys):
    good = (folder / "1.png").read_bytes()
    (folder / "cut.png").write_bytes(good[: len(good) // 2])
    (folder / "empty.png").write_bytes(b"")
    (folder / "text.jpg").write_bytes(b"hello")
    Image.new("RGBA", (4, 4)).save(folder / "alpha.png")
    (folder / "bad.png").write_bytes(good)
    (folder / "bad.json").write_text("{")
    out = tmp_path / "r.jsonl"
    assert main(["score", "--reward", "jpeg_compressibility", str(folder), "--out", str(out)]) == 1
    rows = {row["image"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert len(rows) == 13
    for name, words in (("cut", "readable"), ("empty", "0 bytes"), ("alpha", "alpha channel"), ("bad", "not JSON")):
        assert rows[f"{name}.png"]["score"] is None
        assert words in rows[f"{name}.png"]["error"]
    assert rows["text.jpg"]["score"] is None
    assert rows["1.png"]["score"] is not None
    printed = capsys.readouterr()
    assert "5 of 13 have no score" in printed.err
    assert "RewardInputError" in printed.out.splitlines()[-1]  # failures last


def test_one_picture_by_its_path_and_notes_as_windows_writes_them(folder, tmp_path, capsys):
    for encoding in ("utf-8-sig", "utf-16"):
        text = json.dumps({"prompt": "x", "metadata": None, "note": None})
        (folder / "1.json").write_text(text, encoding=encoding)
        assert main(["score", "--reward", "jpeg_compressibility", str(folder / "1.png")]) == 0
        assert capsys.readouterr().out.splitlines()[1].split()[1] == "1.png"
        (folder / "all.jsonl").write_text(json.dumps({"image": "1.png"}) + "\n", encoding=encoding)
        assert main(["score", "--reward", "jpeg_compressibility", str(folder / "all.jsonl")]) == 0
    (folder / "1.json").write_bytes(b'{"prompt": "caf\xe9"}')
    assert main(["score", "--reward", "jpeg_compressibility", str(folder / "1.png")]) == 1
    assert "1.json, line 1, byte 15: 0xe9 is no UTF-8" in capsys.readouterr().out
    (folder / "p.gif").write_bytes(b"GIF89a\xff")
    assert main(["score", "--reward", "jpeg_compressibility", str(folder / "p.gif")]) == 2
    assert "p.gif, line 1, byte 6" in capsys.readouterr().err
    (folder / "empty.jsonl").write_text("\n")
    assert main(["score", "--reward", "jpeg_compressibility", str(folder / "empty.jsonl")]) == 2
    assert "holds no picture" in capsys.readouterr().err


def test_json_lines_videos_and_paths_that_lead_out(folder, tmp_path, capsys):
    lines = folder / "all.jsonl"
    rows = [
        {"image": "0.png"},
        {"frames": ["0.png", "1.png"]},
        {"image": "../../../etc/hostname"},
        {"image": "/etc/hostname"},
        {"image": "none.png"},
        {"image": 3},
        {"image": "0.png", "metadata": []},
    ]
    lines.write_text("\n".join(map(json.dumps, rows)) + "\nnot json\n")
    out = tmp_path / "r.jsonl"
    command = ["score", "--reward", "sharpness", "--video", "mean", str(lines), "--out", str(out)]
    assert main(command) == 1
    got = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["error"] is None for row in got] == [True, True, *[False] * 6]
    assert got[1]["components"]["frames"] == 2.0
    assert "leads out of" in got[2]["error"]
    assert "leads out of" in got[3]["error"]
    assert "FileNotFoundError" in got[4]["error"]
    assert f"{lines}:8" in got[7]["error"]
    capsys.readouterr()


def test_check_names_file_and_line(tmp_path, capsys):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "one red circle on a white background"}\n{"prompt": "a cat"}\n')
    assert main(["check", "--reward", "shapes", str(prompts)]) == 1
    assert f"{prompts}, line 2: shapes: no 'count'" in capsys.readouterr().err
    prompts.write_text('{"prompt": "one red circle on a white background"}\n')
    assert main(["check", "--reward", "shapes", str(prompts)]) == 0
    assert f"{prompts}, line 1: ShapesTarget(count=1, color='red'" in capsys.readouterr().out
    prompts.write_bytes(b"caf\xe9")
    assert main(["check", "--reward", "shapes", str(prompts)]) == 2
    assert f"{prompts}, line 1, byte 3" in capsys.readouterr().err


def test_check_prints_the_target_of_every_line(tmp_path, capsys):
    pytest.importorskip("rapidocr")
    one, two = tmp_path / "a.txt", tmp_path / "b.csv"
    one.write_text("a 24\" tv that shows \"SALE\"\n'OPEN' in rock 'n' roll style\n")
    two.write_text("prompt,text\na door,42\n")
    assert main(["check", "--reward", "ocr", str(one), str(two)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{one}, line 1: ['SALE']",
        f"{one}, line 2: ['OPEN']",
        f"{two}, line 2: ['42']",
        "3 prompts, every target usable.",
    ]


def test_wrong_commands_say_what_to_change(tmp_path, capsys):
    for arguments, words in (
        (["score", "--reward", "shape", str(tmp_path)], "Did you mean 'shapes'"),
        (["score", "--reward", "shapes", "--option", "strict_wieght=1", str(tmp_path)], "Did you mean 'strict_weight'"),
        (["score", "--reward", "shapes", str(tmp_path / "none")], "neither a folder nor a file"),
        (["serve", "--reward", "shapes", "--host", "0.0.0.0"], "there is no token"),
        (["serve", "--reward", "shapes", "--port", "70000"], "port=70000 must be 0"),
        (["serve", "--reward", "shapes", "--port", "-1"], "port=-1 must be 0"),
        (["serve", "--reward", "shapes", "--threads", "0"], "threads=0 must be a positive number"),
        (["serve", "--reward", "shapes", "--timeout-s", "nan"], "timeout_s=nan must be a positive number"),
        (["score", "--reward", "shapes", str(tmp_path)], "holds no picture"),
        (["score", "--reward", "ocr", "--option", "max_side=abc", str(tmp_path)], "max_side='abc' must be of type int"),
        (["score", "--reward", "shapes", "--option", "strict_weight=[1]", str(tmp_path)], "must be of type float"),
        (["score", "--reward", "pickscore", str(tmp_path)], "--option path=VALUE"),
        (["check", "--reward", "shapes", str(tmp_path / "none.jsonl")], "there is no prompt file"),
    ):
        assert main(arguments) == 2
        assert words in capsys.readouterr().err


def test_options():
    assert options_of(["a=1", "b=0.5", "c=[1,2]", "d=word", "e=x=y", "f=true"]) == {
        "a": 1,
        "b": 0.5,
        "c": [1, 2],
        "d": "word",
        "e": "x=y",
        "f": True,
    }
    with pytest.raises(RewardConfigError, match="KEY=VALUE"):
        options_of(["a"])


def test_the_commands_and_options_are_these():
    commands = next(a for a in parser()._actions if a.dest == "command").choices
    surface = {
        name: sorted(s for a in sub._actions for s in a.option_strings or [a.dest]) for name, sub in commands.items()
    }
    common = ["--help", "--option", "--reward", "--video", "-h"]
    assert surface == {
        "score": sorted([*common, "--html", "--out", "--root", "--top", "path"]),
        "check": sorted([*common, "paths"]),
        "serve": sorted([*common, "--host", "--max-body-mb", "--max-queue", "--port", "--threads", "--timeout-s"]),
        "try": sorted(["--help", "-h", "--option", "--rewards", "--video", "--html", "--root", "--top", "path"]),
        "prompts": ["--help", "-h", "part"],
        "list": ["--help", "-h"],
    }
    parts = next(a for a in commands["prompts"]._actions if a.dest == "part").choices
    assert {n: sorted(s for a in sub._actions for s in a.option_strings or [a.dest]) for n, sub in parts.items()} == {
        "check": sorted(["--help", "-h", "--option", "--rewards", "paths"]),
        "split": sorted(["--help", "-h", "--out", "--share", "path"]),
    }


def test_run_as_a_module():
    done = subprocess.run([sys.executable, "-m", "image_rewards", "list"], capture_output=True, text=True, check=True)
    assert "jpeg_compressibility" in done.stdout


def test_sheet_survives_anything():
    samples = [RewardSample(x) for x in (None, np.zeros((2, 3, 9, 9), np.uint8), np.zeros((3, 900, 30), np.uint8))]
    results = [RewardResult.failed("Broken: <script>"), RewardResult(0.5), RewardResult(2.0, {"<i>": 1.0})]
    page = contact_sheet(samples, results, "<title>")
    assert "<script>" not in page
    assert "<i>" not in page
    assert page.count("<img") == 2
    assert by_score(results) == [2, 1, 0]


def test_several_rewards_side_by_side_in_a_table_and_on_a_page(folder, tmp_path, capsys):
    page = tmp_path / "page.html"
    rewards = ["--rewards", "shapes", "jpeg_compressibility", "--option", "jpeg_compressibility.quality=50"]
    assert main(["try", str(folder), *rewards, "--html", str(page)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ["picture", "shapes", "jpeg_compressibility"]
    assert len(said) == 1 + 8 + 1
    assert said[1].split()[:2] == ["1.png", "1"]  # best of the first reward on top
    text = page.read_text()
    assert text.count("<figure") == text.count("data:image/png") == 8
    assert text.count("<tr ") == 16
    assert "http" not in text  # nothing is loaded from elsewhere
    assert "&lt;b&gt;scene &amp; 1" in text
    assert sorted(re.findall(r'data-places="(\d) ', text)) == sorted("01234567")
    # The numbers are those of `score`.
    out = tmp_path / "one.jsonl"
    one = ["--reward", "jpeg_compressibility", "--option", "quality=50"]
    assert main(["score", *one, str(folder), "--out", str(out)]) == 0
    alone = {row["image"]: row["score"] for row in map(json.loads, out.read_text().splitlines())}
    assert {line.split()[0]: line.split()[2] for line in said[1:9]} == {n: f"{v:.4g}" for n, v in alone.items()}


def test_a_picture_that_one_reward_cannot_score_keeps_its_other_scores(folder, tmp_path, capsys):
    (folder / "0.json").write_text('{"prompt": "a cat"}')
    (folder / "cut.png").write_bytes((folder / "1.png").read_bytes()[:40])
    page = tmp_path / "page.html"
    command = ["try", str(folder), "--rewards", "shapes", "jpeg_compressibility", "--html", str(page), "--top", "0"]
    assert main(command) == 1
    said = capsys.readouterr()
    rows = {line.split()[0]: line.split()[1:] for line in said.out.splitlines()}
    assert rows["0.png"][0] == "-" != rows["0.png"][1]
    assert rows["cut.png"] == ["-", "-"]
    assert "0.png, shapes: RewardTargetError" in said.err
    assert "3 of 18 have no score" in said.err
    assert page.read_text().count("no score</td>") == 3
    for wrong, words in (
        (["--rewards", "shapes", "shapes"], "names one twice"),
        (["--rewards", "shape"], "Did you mean 'shapes'"),
        (["--rewards", "shapes", "--option", "ocr.x=1"], "REWARD.KEY=VALUE with one of shapes"),
    ):
        assert main(["try", str(folder), *wrong]) == 2
        assert words in capsys.readouterr().err


GOOD = {"prompt": "one red circle on a white background"}


def test_prompt_files_are_looked_at_as_a_whole(tmp_path, capsys):
    lines = [json.dumps(GOOD), '{"prompt": ', '{"prompt": ""}', json.dumps({"prompt": "a cat", "metadata": {"k": 1}})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.txt").write_text(f"{GOOD['prompt']}\n")
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")]
    assert main(["prompts", "check", *files, "--rewards", "shapes", "jpeg_compressibility"]) == 1
    said = capsys.readouterr().out
    for part in (
        f"{files[0]}: 2 prompts, 2 different texts of 5 to 36 letters",
        "  metadata: k in 1",
        f"  line 1: {GOOD['prompt']!r}",
        "  line 4: 'a cat' {\"k\": 1}",
        f"  {GOOD['prompt']!r}: {files[0]}, line 1; {files[1]}, line 1",
        "shapes: 2 of 3 prompts have what it needs",
        f"  {files[0]}, line 1: ShapesTarget(count=1",
        "jpeg_compressibility: 3 of 3",
        f"problem: {files[0]}, line 2 is not JSON",
        f"problem: {files[0]}, line 3 needs a non-empty text",
        f"problem: {files[0]}, line 4: shapes: no 'count'",
        "3 problems",
    ):
        assert part in said
    (tmp_path / "good.jsonl").write_text(json.dumps(GOOD))
    assert main(["prompts", "check", str(tmp_path / "good.jsonl"), "--rewards", "shapes"]) == 0
    assert "no text stands twice" in capsys.readouterr().out
    (tmp_path / "empty.txt").write_text("\n")
    assert main(["prompts", "check", str(tmp_path / "empty.txt")]) == 1
    assert "problem: prompt file" in capsys.readouterr().out
    assert main(["prompts", "check", str(tmp_path / "none.txt")]) == 2


def test_a_prompt_file_is_divided_as_a_trainer_divides_it(tmp_path, capsys):
    file = tmp_path / "mine.csv"
    file.write_text("prompt,count\n" + "".join(f"thing {i % 30},{i}\n" for i in range(40)))
    assert main(["prompts", "split", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[2] == (
        f"data.train_file={tmp_path}/mine_train.jsonl data.val_file={tmp_path}/mine_held_out.jsonl"
    )
    train, apart = (read_prompts(tmp_path / f"mine_{part}.jsonl") for part in ("train", "held_out"))
    texts = {row.prompt for row in read_prompts(file)}
    assert {row.prompt for row in apart} == held_out(texts)
    assert len(held_out(texts)) == 3
    assert {row.prompt for row in train} == texts - held_out(texts)
    both = sorted((row.prompt, row.metadata["count"]) for row in [*train, *apart])
    assert both == sorted((f"thing {i % 30}", i) for i in range(40))
    assert main(["prompts", "split", str(file)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["prompts", "split", str(file), "--share", "0.5", "--out", str(tmp_path / "half")]) == 0
    assert len({row.prompt for row in read_prompts(tmp_path / "half" / "mine_held_out.jsonl")}) == 15
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": str(i), "chosen": "a", "rejected": "b"}) + "\n" for i in range(2)))
    assert main(["prompts", "split", str(pairs), "--out", str(tmp_path / "half")]) == 2
    assert "names files by paths in" in capsys.readouterr().err
    (tmp_path / "one.txt").write_text("one\none\n")
    assert main(["prompts", "split", str(tmp_path / "one.txt")]) == 2
    assert "one.txt: holds one text, so none can be held out" in capsys.readouterr().err
    assert main(["prompts", "split", str(pairs), "--share", "1.5"]) == 2
    assert "more than 0 and less than 1" in capsys.readouterr().err
