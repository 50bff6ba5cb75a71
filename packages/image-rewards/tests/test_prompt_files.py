"""Prompt files as people have them are read, and what cannot be read is refused with its file and line."""

from __future__ import annotations

import json

import pytest
from image_rewards import MissingExtraError, PromptFileError, RewardTargetError
from image_rewards.prompt_files import read_prompts
from image_rewards.scene_rules import parse_questions

LINE = '{"prompt": "an é", "metadata": {"k": 1}}\n'


def texts(path):
    return [row.prompt for row in read_prompts(path)]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_encodings_with_a_mark_and_all_line_ends_are_read(tmp_path, encoding, end):
    file = tmp_path / "p.jsonl"
    file.write_bytes((LINE * 2 + "\n" + LINE).replace("\n", end).encode(encoding))
    rows = read_prompts(file)
    assert [(row.number, row.prompt, row.metadata) for row in rows] == [(n, "an é", {"k": 1}) for n in (1, 2, 4)]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("p.jsonl", LINE.encode() + LINE.encode("latin-1"), "line 2, byte 57: 0xe9 is no UTF-8"),
        ("p.txt", "a\ncafé\n".encode("cp1252"), "line 2, byte 5: 0xe9"),
        ("p.csv", "prompt\r\ncafé\r\n".encode("latin-1"), "line 2, byte 11"),
        ("p.txt", "a cat\nb".encode("utf-16-le"), "line 1: holds zero bytes"),
        ("p.txt", "a cat".encode("utf-16")[:-1], "no UTF-16"),
        ("p.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git-LFS pointer"),
        ("p.txt", b"<!DOCTYPE html>\n<html></html>", "HTML page"),
        ("p.jsonl", b"\x1f\x8b\x08\x00", "is gzip data, not text; unpack"),
        ("p.jsonl.gz", b"\x1f\x8b\x08\x00", "is gzip data"),
        ("p.csv", b"PK\x03\x04\x14\xff", "an Excel file"),
        ("p.txt", b"PAR1\xff", "a Parquet file"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": "a"', "line 2 is not JSON"),
        ("p.jsonl", b'{"prompt": "a"}\n3\n', 'line 2 needs a non-empty text under "prompt"'),
        ("p.jsonl", b'{"prompt": "\\ud83d"}', "half of a surrogate pair"),
        ("p.jsonl", b'{"prompt": "a", "negative_promt": "b"}', 'looks like "negative_prompt"'),
        ("p.jsonl", b'{"prompt": "a", "negative": "b"}', 'looks like "negative_prompt"'),
        ("p.jsonl", b'{"prompt": "a", "neg_prompt": "b"}', 'looks like "negative_prompt"'),
        ("p.jsonl", b'{"prompt": "a", "negative_prompt": 3}', '"negative_prompt" must be a text'),
        ("p.jsonl", b'{"prompt": "a", "k": 1, "metadata": {"k": 2}}', "'k' stands both"),
        ("p.jsonl", b'{"prompt": "a", "metadata": "no"}', '"metadata" must be an object'),
        ("p.jsonl", b'{"caption": 3}', 'non-empty text under "caption"'),
        ("p.json", b'[\n{"prompt": "a"},\n{"prompt": \n', "line 4 is not JSON"),
        ("p.json", b"[1, 2]", "a JSON file is a list of objects or of texts"),
        ("p.json", b'["a", ""]', 'entry 2 needs a non-empty text under "prompt"'),
        ("p.csv", b"a,b\n1,2\n", "line 1 names no column prompt or caption or text, only 'a', 'b'"),
        ("p.csv", b"prompt,id\n\na cat, a dog,1\n", "line 3 has 3 cells for 2 columns"),
        ("p.csv", b"prompt,id\n,1\n", "line 2 needs a non-empty text"),
        ("p.csv", b'prompt\n"a cat\n', "is no CSV"),
        ("p.csv", b"prompt,id,id\na,1,2\n", "column 'id' twice"),
        ("p.csv", b"prompt\n", "holds no prompt"),
        ("p.txt", b" \n\n", "holds no prompt"),
        ("p.xlsx", b"hello", "end its name with one of"),
    ],
)
def test_what_cannot_be_read_is_refused_with_file_and_line(tmp_path, name, data, words):
    file = tmp_path / name
    file.write_bytes(data)
    with pytest.raises(PromptFileError) as caught:
        read_prompts(file)
    assert str(file) in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("letter", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
@pytest.mark.parametrize("name", ["p.jsonl", "p.json", "p.txt", "p.csv"])
def test_only_line_ends_end_a_line(tmp_path, name, letter):
    file, prompt = tmp_path / name, f"a{letter}b"
    if letter < " " and name.startswith("p.json"):
        pytest.skip("JSON wants these escaped")
    row = json.dumps({"prompt": prompt}, ensure_ascii=False)
    content = {"p.jsonl": f"{row}\n{row}\n", "p.json": f"[{row},\n{row}]", "p.txt": f"{prompt}\n{prompt}\n"}
    file.write_bytes(content.get(name, f"prompt\n{prompt}\n{prompt}\n").encode())
    assert texts(file) == [prompt, prompt]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.txt", "a cat, black\n\n  a dog \r\n"),
        ("p.json", '["a cat, black", {"prompt": "a dog"}]'),
        ("p.json", '{"prompt": "a cat, black"}\n{"caption": "a dog"}\n'),
        ("p.jsonl", '[{"prompt": "a cat, black"}, {"text": "a dog"}]'),
        ("p.txt", '{"prompt": "a cat, black"}\n{"prompt": "a dog"}\n'),
        ("p.csv", 'prompt,n\n"a cat, black",1\na dog,2\n'),
        ("p.csv", "id;Caption\n1;a cat, black\n2;a dog\n"),
        ("p.tsv", "text\tn\na cat, black\t1\na dog\t2\n"),
        ("prompts", '{"prompt": "a cat, black"}\n"a dog"\n'),
    ],
)
def test_kinds_of_files(tmp_path, name, content):
    file = tmp_path / name
    file.write_bytes(content.encode())
    assert texts(file) == ["a cat, black", "a dog"]


def test_wildcards_and_brackets_in_a_text_file_are_no_json(tmp_path):
    (tmp_path / "p.txt").write_text("{red|blue} car\n[style] a cat\n")
    assert texts(tmp_path / "p.txt") == ["{red|blue} car", "[style] a cat"]


def test_fields_names_and_nulls(tmp_path):
    file = tmp_path / "p.jsonl"
    rows = [
        {"prompt": "a", "metadata": None, "negative_prompt": None, "text": "OPEN"},
        {"prompt": None, "caption": "b", "text": "t", "metadata": {"x": {"y": None, "z": [1]}}, "w": float("nan")},
        {"text": "c", "metadata": '{"k": 1}', "k": 1},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert [(r.prompt, r.negative_prompt, r.metadata) for r in read_prompts(file)] == [
        ("a", None, {"text": "OPEN"}),
        ("b", None, {"text": "t", "x": {"z": [1]}}),
        ("c", None, {"k": 1}),
    ]


def test_cells_of_a_table(tmp_path):
    file = tmp_path / "p.csv"
    file.write_text(
        'prompt,negative_prompt,text,count,include,note,metadata\n"a\nb",,42,3,"[{""class"": ""dog""}]",,\n'
        'c,7,,,,{x,"{""k"": 1}"\n'
    )
    first, second = read_prompts(file)
    assert (first.number, first.prompt, first.negative_prompt) == (2, "a\nb", None)
    assert first.metadata == {"text": "42", "count": 3, "include": [{"class": "dog"}]}
    assert (second.number, second.negative_prompt, second.metadata) == (4, "7", {"note": "{x", "k": 1})


def test_geneval_own_files_are_read(tmp_path):
    file = tmp_path / "evaluation_metadata.jsonl"
    rows = [
        {
            "tag": "position",
            "include": [{"class": "dog", "count": 1}, {"class": "cat", "count": 1, "position": ["left of", 0]}],
            "prompt": "a photo of a cat left of a dog",
        },
        {
            "tag": "counting",
            "include": [{"class": "cat", "count": 2}],
            "exclude": [{"class": "cat", "count": 3}],
            "prompt": "a photo of two cats",
        },
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    position, counting = (parse_questions(r.metadata, {"cat", "dog"}, ("red",)) for r in read_prompts(file))
    assert position.include[1].relation == "left of"
    assert counting.exclude[0].count == 3


def test_geneval_words_become_the_detectors():
    from image_rewards.geneval import in_words_of

    asked = {
        "tag": "x",
        "include": [{"class": "computer mouse", "count": 1}, {"class": "couch"}],
        "exclude": [{"class": "dog"}],
    }
    coco = in_words_of({"mouse", "couch", "dog"}, asked)
    assert [row["class"] for row in coco["include"]] == ["mouse", "couch"]
    assert coco["exclude"] == asked["exclude"]
    voc = in_words_of({"computer mouse", "sofa"}, asked)
    assert [row["class"] for row in voc["include"]] == ["computer mouse", "sofa"]
    assert parse_questions(coco, {"mouse", "couch", "dog"}, ()).include[0].name == "mouse"
    assert in_words_of({"mouse"}, {"include": "odd"}) == {"include": "odd"}
    for row, words in (
        ({"class": ["cat"]}, r"class=\['cat'\]"),
        ({"class": "cat", "color": ["red"]}, r"color=\['red'\]"),
    ):
        with pytest.raises(RewardTargetError, match=words):
            parse_questions(in_words_of({"cat"}, {"include": [row]}), {"cat"}, {"red": 1})


def test_lists_and_folders(tmp_path):
    (tmp_path / "b.txt").write_text("one\n")
    (tmp_path / "a.jsonl").write_text('{"prompt": "two"}\n')
    (tmp_path / "README.md").write_text("not a prompt")
    (tmp_path / ".hidden.txt").write_text("not a prompt")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "c.txt").write_text("three\n")
    assert texts(tmp_path) == ["two", "one"]
    assert texts([tmp_path / "b.txt", str(tmp_path / "below")]) == ["one", "three"]
    for paths, words in (
        ([], "no prompt file is named"),
        ("", "no prompt file is named"),
        ("a,b", r"\[a.jsonl,b.jsonl\]"),
        ([tmp_path / "none.txt"], "there is no prompt file"),
        ([tmp_path, tmp_path / "b.txt"], "named twice"),
    ):
        with pytest.raises(PromptFileError, match=words):
            read_prompts(paths)
    (tmp_path / "empty").mkdir()
    with pytest.raises(PromptFileError, match="holds no prompt file"):
        read_prompts(tmp_path / "empty")


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    file = tmp_path / "p.parquet"
    rows = [{"caption": "a", "metadata": {"k": 1, "q": None}, "w": None}, {"caption": "b", "metadata": None, "w": 2.5}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    assert [(r.prompt, r.metadata, r.where) for r in read_prompts(file)] == [
        ("a", {"k": 1}, f"{file}, row 1"),
        ("b", {"w": 2.5}, f"{file}, row 2"),
    ]
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "a", "image": b"png"}]), file)
    with pytest.raises(PromptFileError, match="metadata must be JSON"):
        read_prompts(file)
    file.write_bytes(b"PAR1")
    with pytest.raises(PromptFileError, match="no readable Parquet file"):
        read_prompts(file)


def test_parquet_without_pyarrow_names_the_install_command(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "p.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingExtraError, match=r"image-rewards\[parquet\]"):
        read_prompts(tmp_path / "p.parquet")


def save_to_disk(folder, rows, files=2):
    """What `datasets.Dataset.save_to_disk` leaves: Arrow streams and a `state.json` that names them."""
    pyarrow = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{files:05d}.arrow" for i in range(files)]
    for i, name in enumerate(names):
        table = pyarrow.Table.from_pylist(rows[i::files])
        with pyarrow.OSFile(str(folder / name), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_data_set_on_disk_is_read_in_the_order_of_its_files(tmp_path):
    rows = [{"caption": f"a {name}", "text": None, "count": i} for i, name in enumerate(("cat", "dog", "cow", "owl"))]
    folder = save_to_disk(tmp_path / "set" / "train", rows)
    found = read_prompts(folder)
    assert [(row.prompt, row.metadata) for row in found] == [
        ("a cat", {"count": 0}), ("a cow", {"count": 2}), ("a dog", {"count": 1}), ("a owl", {"count": 3}),
    ]  # fmt: skip
    assert found[2].where == f"{folder}, row 3"
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(PromptFileError, match=r"several splits; name one: .*set/NAME, of train"):
        read_prompts(tmp_path / "set")


def test_a_data_set_that_cannot_be_read_says_why(tmp_path):
    folder = save_to_disk(tmp_path / "a", [{"prompt": "x", "picture": b"123"}, {"prompt": "y", "picture": b"4"}])
    with pytest.raises(PromptFileError, match="a, row 1, column 'picture': metadata must be JSON"):
        read_prompts(folder)
    next(folder.glob("*.arrow")).write_bytes(b"no arrow")
    with pytest.raises(PromptFileError, match="a is no readable data set"):
        read_prompts(folder)
    (folder / "state.json").write_text('{"_indices_files": [{"filename": "i.arrow"}]}')
    with pytest.raises(PromptFileError, match="flatten_indices"):
        read_prompts(folder)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "../../b.arrow"}]}')
    with pytest.raises(PromptFileError, match="no readable data set"):
        read_prompts(folder)


def test_the_real_library_writes_what_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"prompt": "a cat", "n": 1}, {"prompt": "a dog", "n": 2}]).save_to_disk(tmp_path / "d")
    assert [(row.prompt, row.metadata) for row in read_prompts(tmp_path / "d")] == [
        ("a cat", {"n": 1}),
        ("a dog", {"n": 2}),
    ]
