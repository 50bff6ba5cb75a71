import json

import pytest
from omni_rollout.config import DiffusionPipelineConfig
from ray_trainer.assets import builtin
from ray_trainer.compose import compose
from ray_trainer.config import DataConfig, to_yaml
from ray_trainer.errors import TrainerError
from ray_trainer.prompts import Prompt, PromptSampler, load_prompt_sets, load_prompts
from ray_trainer.rollouts import negative_prompt

SETS = ("creative", "geneval", "ocr", "tiny_shapes", "video")


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_shipped_prompts_are_split_without_overlap():
    train, held_out = load_prompts("builtin:tiny_shapes_train"), load_prompts("builtin:tiny_shapes_heldout")
    assert (len(train), len(held_out)) == (96, 48)
    assert not {p.text for p in train} & {p.text for p in held_out}
    for prompt in (*train, *held_out):
        assert prompt.metadata["color"] in prompt.text
        assert prompt.metadata["shape"] in prompt.text
        assert prompt.metadata["background"] in prompt.text


def test_equal_texts_are_different_prompts(tmp_path):
    path = write(tmp_path / "p.jsonl", '{"prompt": "a cat"}', "", '{"prompt": "a cat", "metadata": {"k": 1}}')
    first, second = load_prompts(path)
    assert first.text == second.text
    assert first.uid != second.uid
    assert second.metadata == {"k": 1}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "a"', "line 2 is not JSON"),
        ('{"prompt": ""}', "line 2 needs a non-empty text"),
        ('{"count": 3}', "line 2 needs a non-empty text"),
        ('["a"]', "line 2 needs a non-empty text"),
        ('{"prompt": "a", "metadata": 3}', 'line 2: "metadata" must be an object'),
        ('{"prompt": "a", "negative_prompts": "x"}', 'looks like "negative_prompt"'),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, complaint):
    path = write(tmp_path / "p.jsonl", '{"prompt": "fine"}', line)
    with pytest.raises(TrainerError) as caught:
        load_prompts(path)
    assert complaint in str(caught.value)


def test_several_files_name_their_lines_apart(tmp_path):
    one, two = write(tmp_path / "a.txt", "a cat", "a dog"), write(tmp_path / "b.csv", "prompt,count", "a cow,3")
    prompts = load_prompts([one, two])
    assert [(p.uid, p.text, p.metadata) for p in prompts] == [
        ("line1", "a cat", {}),
        ("line2", "a dog", {}),
        ("file2-line2", "a cow", {"count": 3}),
    ]
    assert prompts[2].where == f"{two}, line 2"
    assert [p.uid for p in load_prompts(one)] == ["line1", "line2"]
    assert len(load_prompts([one, "builtin:tiny_shapes_heldout"])) == 50
    for wrong in ([], ""):
        with pytest.raises(TrainerError):
            load_prompts(wrong)


def test_a_list_on_the_command_line_and_in_a_recipe(tmp_path):
    one, two = write(tmp_path / "a.txt", *["a red circle"] * 6), write(tmp_path / "b.txt", "a dog")
    (tmp_path / "r.yaml").write_text(f"base: builtin:tiny\ndata: {{val_file: [{one}, {two}]}}\n")
    config = compose(
        "flowgrpo", tmp_path / "r.yaml", [f"data.train_file=[{one},{two}]", f"data.val_file=[{one},{two}]"]
    )
    assert [len(load_prompts(f)) for f in (config.data.train_file, config.data.val_file)] == [7, 7]
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert compose("flowgrpo", again, []).data == config.data


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(TrainerError, match="there is no prompt file"):
        load_prompts(str(tmp_path / "none.jsonl"))
    with pytest.raises(TrainerError, match="holds no prompt"):
        load_prompts(write(tmp_path / "e.jsonl", ""))
    with pytest.raises(TrainerError) as caught:
        load_prompts("builtin:tiny_shapes")
    known = [f"{kind}_{part}" for kind in SETS for part in ("heldout", "train")]
    assert f"known are {known}" in str(caught.value)
    assert json.loads((builtin("models", "tiny_qwen_image") / "model_index.json").read_text())["_class_name"]


def test_the_sampler_is_a_function_of_seed_and_step():
    prompts = load_prompts("builtin:tiny_shapes_train")
    sampler = PromptSampler(prompts, DataConfig(), seed=3)
    epoch = [p.uid for step in range(16) for p in sampler.at(step)]
    assert sorted(epoch) == sorted(p.uid for p in prompts)  # without replacement
    assert [p.uid for p in sampler.at(5)] == [p.uid for p in PromptSampler(prompts, DataConfig(), seed=3).at(5)]
    assert [p.uid for p in sampler.at(0)] != [p.uid for p in sampler.at(16)]  # a new order each epoch
    assert [p.uid for p in sampler.at(0)] != [p.uid for p in PromptSampler(prompts, DataConfig(), seed=4).at(0)]
    with pytest.raises(TrainerError, match="must lie between 1 and 96, as many"):
        PromptSampler(prompts, DataConfig(prompts_per_step=97), seed=0)


def test_a_prompt_without_a_negative_one_takes_the_recipes():
    plain, own, empty = (Prompt("line1", "a cat", negative) for negative in (None, "blurry", ""))
    assert negative_prompt(plain, DiffusionPipelineConfig()) == ""  # SD3, Wan, Z-Image; it was a space for every model
    for given, taken in ((plain, " "), (own, "blurry"), (empty, "")):
        assert negative_prompt(given, DiffusionPipelineConfig(negative_prompt=" ")) == taken


def data_of(tmp_path, texts, **options):
    from ray_trainer.config import DataConfig

    (tmp_path / "mine.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    return DataConfig(train_file=str(tmp_path / "mine.jsonl"), val_file="", **options)


def test_without_a_validation_file_the_same_tenth_of_the_texts_is_held_out(tmp_path):
    texts = [f"thing {number}" for number in range(40)]
    train, val = load_prompt_sets(data_of(tmp_path, [*texts, *texts]))
    assert len({p.text for p in val}) == 4
    assert len(val) == 8
    assert {p.text for p in train} | {p.text for p in val} == set(texts)
    assert not {p.text for p in train} & {p.text for p in val}
    again = load_prompt_sets(data_of(tmp_path, texts[::-1]))[1]
    assert {p.text for p in again} == {p.text for p in val}
    assert len(load_prompt_sets(data_of(tmp_path, texts, val_max_prompts=2))[1]) == 2
    assert len(load_prompt_sets(data_of(tmp_path, texts[:2]))[1]) == 1
    with pytest.raises(TrainerError, match=r"more to train on .* give data\.val_file=FILE"):
        load_prompt_sets(data_of(tmp_path, ["one", "one"]))


def test_a_training_file_takes_no_other_files_validation(tmp_path):
    (tmp_path / "r.yaml").write_text("data: {train_file: a.jsonl, val_file: b.jsonl}\n")
    compose_with = lambda *given: compose("flowgrpo", tmp_path / "r.yaml", list(given)).data  # noqa: E731
    assert compose_with().val_file == "b.jsonl"
    assert compose_with("data.train_file=mine.jsonl").val_file == ""
    assert compose_with("data.train_file=mine.jsonl", "data.val_file=v.jsonl").val_file == "v.jsonl"


def test_paths_reach_workers_in_other_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "r.yaml").write_text(
        "model: {path: models/mine}\nreward: {options: {path: ./models/mine, note: models}}\n"
    )
    config = compose("flowgrpo", tmp_path / "r.yaml", ["trainer.run_dir=runs/x"])
    assert config.trainer.run_dir == str(tmp_path / "runs" / "x")
    assert config.model.path == config.actor.model_config.path == str(tmp_path / "models" / "mine")
    assert config.reward.options == {"path": str(tmp_path / "models" / "mine"), "note": "models"}
    assert compose("flowgrpo", tmp_path / "r.yaml", ["model.path=Qwen/Qwen-Image"]).model.path == "Qwen/Qwen-Image"
