"""The prompt sets that ship: what the tool writes, without overlap, with targets that the rewards can read."""

import importlib.util
from pathlib import Path

import pytest
from image_rewards.geneval import COLORS
from image_rewards.ocr import OcrReward
from image_rewards.scene_rules import parse_questions
from ray_trainer.assets import builtin
from ray_trainer.prompts import load_prompts

FILE = Path(__file__).resolve().parent.parent / "tools" / "make_prompts.py"
spec = importlib.util.spec_from_file_location("make_prompts", FILE)
make_prompts = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_prompts)

# What a detector trained on COCO can find.
COCO = """person bicycle car motorcycle airplane bus train truck boat traffic_light fire_hydrant stop_sign parking_meter bench
bird cat dog horse sheep cow elephant bear zebra giraffe backpack umbrella handbag tie suitcase frisbee skis snowboard
sports_ball kite baseball_bat baseball_glove skateboard surfboard tennis_racket bottle wine_glass cup fork knife spoon bowl
banana apple sandwich orange broccoli carrot hot_dog pizza donut cake chair couch potted_plant bed dining_table toilet tv laptop
mouse remote keyboard cell_phone microwave oven toaster sink refrigerator book clock vase scissors teddy_bear hair_drier
toothbrush"""
CLASSES = {name.replace("_", " ") for name in COCO.split()}


def test_the_tool_writes_the_shipped_files(tmp_path):
    files = make_prompts.write(tmp_path)
    assert len(files) == 8
    for file in files:
        assert file.read_bytes() == builtin("prompts", file.stem).read_bytes(), (
            f"run tools/make_prompts.py: {file.name}"
        )


@pytest.mark.parametrize("name", make_prompts.SETS)
def test_train_and_held_out_are_apart(name):
    train, held_out = load_prompts(f"builtin:{name}_train"), load_prompts(f"builtin:{name}_heldout")
    assert 100 <= len(train) <= 200
    assert 40 <= len(held_out) <= 60
    texts = [p.text for p in (*train, *held_out)]
    assert len(set(texts)) == len(texts)
    if name in ("ocr", "geneval"):
        asked = [[repr(sorted(p.metadata.items())) for p in part] for part in (train, held_out)]
        assert not set(asked[0]) & set(asked[1])


def test_no_subject_or_event_is_in_both():
    for name, separator in (("creative", None), ("video", ", ")):
        train, held_out = (load_prompts(f"builtin:{name}_{part}") for part in ("train", "heldout"))
        if separator:  # an event is what stands before the camera
            first, second = ({p.text.rsplit(separator, 1)[0] for p in part} for part in (train, held_out))
        else:
            first, second = ({" ".join(p.text.split()[:3]) for p in part} for part in (train, held_out))
        assert not first & second


def test_texts_to_be_written_stand_in_the_prompt_and_can_be_read():
    reward = OcrReward()
    for part in ("train", "heldout"):
        for prompt in load_prompts(f"builtin:ocr_{part}"):
            assert f'"{prompt.metadata["text"]}"' in prompt.text
            reward.check_target(prompt.text, prompt.metadata)


def test_questions_can_be_answered_by_a_detector_of_coco():
    for part in ("train", "heldout"):
        prompts = load_prompts(f"builtin:geneval_{part}")
        assert {p.metadata["tag"] for p in prompts} == set(make_prompts.GENEVAL)
        for prompt in prompts:
            questions = parse_questions(prompt.metadata, CLASSES, COLORS)
            for asked in questions.include:
                assert asked.name[:3] in prompt.text
                assert asked.color is None or f"{asked.color} {asked.name}" in prompt.text
                assert asked.relation is None or asked.relation in prompt.text
            many = [asked for asked in questions.include if asked.count > 1]
            assert [(e.name, e.count) for e in questions.exclude] == [(asked.name, asked.count + 1) for asked in many]
