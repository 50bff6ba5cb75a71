"""The command line, the contact sheet and reading folders."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from image_rewards import RewardConfigError, RewardResult, RewardSample
from image_rewards.cli import main, options_of, parser
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
        "list": ["--help", "-h"],
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
