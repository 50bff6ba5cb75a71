"""Rewards as people write them: functions, lambdas, classes, instances, files; numbers of every kind; mistakes said by name."""

from __future__ import annotations

import math
import sys
from fractions import Fraction

import numpy as np
import pytest
from image_rewards import (
    PerSampleReward,
    Reward,
    RewardConfigError,
    RewardError,
    RewardResult,
    RewardSample,
    UnknownRewardError,
    load,
)
from image_rewards.functions import FunctionReward, as_reward, inputs_of
from image_rewards.manager import ImageRewardManager
from image_rewards.registry import BUILTIN, find
from image_rewards.shapes import ShapesReward
from image_rewards.video import VideoReward

SAMPLE = RewardSample(np.full((3, 4, 4), 128, np.uint8), "a cat", {"k": 2}, uid="p7", index=3)

FILE = """
import beside
from image_rewards import PerSampleReward, RewardResult

def red(image, prompt):
    return image[0].mean() / 255

def scaled(image, prompt, metadata, factor: float = 1.0):
    return metadata["k"] * factor

blue = lambda image, prompt: beside.VALUE

class Red(PerSampleReward):
    def __init__(self, gain: float = 1.0):
        self.gain = gain

    def score_one(self, sample):
        return self.gain

class Plain:
    def __call__(self, image, prompt):
        return 4

made = Red(3.0)
number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    for name in ("beside", "my_rewards_here"):
        sys.modules.pop(name, None)
    (tmp_path / "beside.py").write_text("VALUE = 0.25\n")
    (tmp_path / "my_rewards_here.py").write_text(FILE)
    return tmp_path


@pytest.mark.parametrize("where", ["./my_rewards_here.py", "my_rewards_here.py", "my_rewards_here"])
def test_what_stands_in_a_file_is_a_reward(folder, where):
    for name, options, score in (
        ("red", {}, 128 / 255),
        ("scaled", {"factor": 3}, 6.0),
        ("blue", {}, 0.25),
        ("Red", {"gain": 2.0}, 2.0),
        ("made", {}, 3.0),
        ("Plain", {}, 4.0),
    ):
        assert load(f"{where}:{name}", **options)(SAMPLE).unwrap() == pytest.approx(score)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("./none.py:red", {}, "there is no file"),
        ("./json.py:red", {}, "'json' is the name of another module"),
        ("./my_rewards_here.py:rad", {}, "Did you mean 'red'"),
        ("my_rewards_here:rad", {}, "Did you mean 'red'"),
        ("./broken.py:red", {}, "SyntaxError"),
        ("./stops.py:red", {}, "SystemExit"),
        ("my_rewards_here", {}, "or give 'module:attribute' or './file.py:attribute'"),
        ("my_rewards_here:number", {}, "give a function (image, prompt)"),
        ("my_rewards_here:made", {"gain": 1}, "options {'gain': 1} go with"),
        ("my_rewards_here:Red", {"gian": 1}, "Did you mean 'gain'"),
        ("my_rewards_here:Red", {"gain": "much"}, "gain='much' must be of type float"),
        ("my_rewards_here:scaled", {"facto": 1}, "Did you mean 'factor'"),
        ("pickscore", {}, "needs the option 'path': set reward.options.path=VALUE"),
        ("http", {}, "needs the option 'url'"),
        ("vlm", {}, "needs the option"),
        ("geneval", {}, "needs the option 'detector'"),
        ("combine", {}, "needs the option 'parts'"),
        ("combine", {"parts": 3}, "cannot be made with"),
        ("ocr", {"max_side": "abc"}, "max_side='abc' must be of type int"),
        ("ocr", {"ignore_case": 1}, "ignore_case=1 must be of type bool"),
        ("http", {"url": 3}, "url=3 must be of type str"),
    ],
)
def test_names_and_options_that_do_not_fit(folder, name, options, words):
    (folder / "broken.py").write_text("def red(:\n")
    (folder / "json.py").touch()
    (folder / "stops.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(RewardError) as caught:
        load(name, **options)
    assert isinstance(caught.value, RewardConfigError | UnknownRewardError)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_functions_may_ask_by_name_alone():
    def one(image, *, prompt, metadata=None, gain=1.0):
        return gain * len(prompt) + metadata["k"]

    def many(images, *, prompts, metadata):
        return [len(prompt) + row["k"] for prompt, row in zip(prompts, metadata, strict=True)]

    assert as_reward(one)(SAMPLE).unwrap() == 7
    assert as_reward(one, {"gain": 2.0})(SAMPLE).unwrap() == 12
    assert as_reward(many)(SAMPLE).unwrap() == 7
    with pytest.raises(RewardConfigError, match="has no option 'prompt'"):
        as_reward(one, {"prompt": "x"})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_option_that_is_no_finite_number_is_refused(value):
    with pytest.raises(RewardConfigError, match="must be a finite number"):
        load("ocr", exact_weight=value)


@pytest.mark.parametrize("name", ["./my_rewards_here:red", "./notes.ipynb:red", "folder/file:red"])
def test_a_path_without_py_is_told_so(folder, name):
    with pytest.raises(UnknownRewardError, match=r"no module and no \.py file"):
        load(name)


@pytest.mark.parametrize(("components", "came"), [(None, "there is None"), ([1], r"there is a list \(\[1\]\)")])
def test_components_that_are_no_mapping_are_said(components, came):
    with pytest.raises(RewardError, match=came):
        as_reward(lambda image: RewardResult(1.0, components))(SAMPLE).unwrap()


def test_functions_get_what_they_ask_for():
    def of_lists(images, prompts, metadata):
        return [len(p) + m["k"] for p, m in zip(prompts, metadata, strict=True)]

    for function, score in (
        (lambda image: image.mean(), 128),
        (lambda image, prompt: len(prompt), 5),
        (lambda image, prompt, metadata: metadata["k"], 2),
        (lambda sample: sample.index, 3),
        (lambda samples: np.arange(len(samples)) + 1.0, 1),
        (of_lists, 7),
        (lambda *what: len(what), 2),
    ):
        assert as_reward(function)(SAMPLE).unwrap() == score
        assert ImageRewardManager(function).score([SAMPLE])[0].score == score
        assert load("combine", parts=[{"reward": function, "name": "mine"}])(SAMPLE).unwrap() == score
    with pytest.raises(RewardConfigError, match="takes no picture"):
        as_reward(lambda: 1.0)


def numbers():
    import torch

    return [
        1, True, 1.0, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0), np.ones(1), np.ones((1, 1)), Fraction(1),
        torch.tensor(1.0), torch.ones(1, dtype=torch.bfloat16), torch.ones(1, requires_grad=True),
    ]  # fmt: skip


def test_numbers_of_every_kind_are_scores():
    for value in numbers():
        result = FunctionReward(lambda image, value=value: value, options={"value": value})(SAMPLE)
        assert (result.score, type(result.score), result.error) == (1.0, float, None)
        parts = FunctionReward(lambda image, value=value: RewardResult(value, {"c": value}))(SAMPLE)
        assert (parts.score, parts.components, type(parts.components["c"])) == (1.0, {"c": 1.0}, float)


async def later(image):
    return 1.0


@pytest.mark.parametrize(
    ("value", "came"),
    [
        (None, "None"),
        ("good", "a str ('good')"),
        ({"score": 1.0}, "a dict"),
        ((1.0, {}), "a tuple"),
        ([1.0], "a list"),
        (np.zeros(2), "a ndarray of shape (2,)"),
        (np.array("x"), "a ndarray"),
        (1j, "a complex"),
        (math.nan, "nan, which is not a finite number"),
        (-math.inf, "-inf"),
        (np.float32("nan"), "nan"),
        (10**400, "a whole number of many digits"),
        (later, "a coroutine"),
    ],
)
def test_what_is_no_score_is_said_by_name(value, came):
    class Wrong(PerSampleReward):
        def score_one(self, sample):
            return value(sample.image) if callable(value) else value

    class Inside(PerSampleReward):
        def score_one(self, sample):
            return RewardResult(value(sample.image) if callable(value) else value)

    for reward in (Wrong(), Inside()):
        result = reward(SAMPLE)
        assert math.isnan(result.score)
        for words in (type(reward).__name__, "sample p7[3]", came, "return a finite number"):
            assert words in str(result.error)


@pytest.mark.parametrize("part", [math.nan, math.inf, None, "x", [1.0], {"a": 1}, np.zeros(3), 10**400])
def test_a_component_that_is_no_number_is_refused_by_name(part):
    result = as_reward(lambda image: RewardResult(1.0, {"fine": 1.0, "odd": part}))(SAMPLE)
    assert math.isnan(result.score)
    assert "'odd'" in str(result.error)
    assert "components must be" in str(result.error)
    for components in (None, [1.0], 3):
        assert "components must be" in str(as_reward(lambda image, c=components: RewardResult(1.0, c))(SAMPLE).error)


@pytest.mark.parametrize(
    ("answer", "came"),
    [
        ([1.0], "1 results"),
        ([1.0, 2.0, 3.0], "3 results"),
        (None, "None"),
        (1.0, "1.0"),
        ({}, "a dict"),
        (np.zeros((2, 2)), "a ndarray of shape (2, 2)"),
        ("ab", "a str"),
    ],
)
def test_a_batch_that_does_not_fit_is_said_by_name(answer, came):
    class Batch(Reward):
        def score_valid(self, samples):
            return answer

    with pytest.raises(RewardError) as caught:
        Batch().score([SAMPLE, SAMPLE])
    for words in ("'Batch'", came, "for 2 samples", "sample p7[3]", "return one RewardResult or number for each"):
        assert words in str(caught.value)


def test_lists_and_arrays_of_numbers_are_a_batch():
    import torch

    for answer in ([1, 2.0], (1, np.float64(2)), np.array([1, 2]), torch.tensor([1.0, 2.0]), [RewardResult(1.0), 2]):

        class Batch(Reward):
            def score_valid(self, samples, answer=answer):
                return answer

        assert [r.score for r in Batch().score([SAMPLE, SAMPLE])] == [1.0, 2.0]


def test_nobody_writes_into_a_picture_or_its_metadata():
    def spoils(image, prompt):
        image[:] = 0
        return 1.0

    def notes(image, prompt, metadata):
        metadata["k"] += 1
        return metadata["k"]

    picture = np.full((3, 4, 4), 128, np.uint8)
    sample = RewardSample(picture, "a", {"k": 1})
    with pytest.raises(RewardError, match=r"'spoils' writes into its picture.*sample\.image\.copy\(\)"):
        as_reward(spoils)(sample)
    parts = [{"reward": spoils}, {"reward": lambda image: image.mean(), "name": "mean"}]
    for order in (parts, parts[::-1]):
        with pytest.raises(RewardError, match="writes into its picture"):
            load("combine", parts=order)(sample)
    twice = load("combine", parts=[{"reward": notes, "name": "a"}, {"reward": notes, "name": "b"}])
    assert twice(sample).components["a"] == twice(sample).components["b"] == 2
    assert (picture == 128).all()
    assert sample.metadata == {"k": 1}
    assert picture.flags.writeable


def test_a_failure_without_a_cause_says_so():
    result = as_reward(lambda image: RewardResult(math.nan, {}, ""))(SAMPLE)
    assert "gave no cause" in str(result.error)


def quiet(latents, prompt, gain: float = 1.0):
    return -gain * float(np.abs(latents).mean())


class Loud(Reward):
    inputs = "latents"

    def score_valid(self, samples):
        return [sample.image.max() for sample in samples]


def test_a_reward_may_read_latents():
    clean = np.linspace(-1, 3, 24, dtype=np.float32).reshape(6, 4)
    made = as_reward(quiet, {"gain": 2.0})
    assert made(RewardSample(clean, "a")).unwrap() == pytest.approx(-2 * np.abs(clean).mean())
    assert Loud()(RewardSample(clean)).unwrap() == 3
    kinds = [quiet, Loud, Loud(), made, lambda image: 0.0, ShapesReward, ShapesReward()]
    assert [inputs_of(kind) for kind in kinds] == ["latents"] * 4 + ["pixels"] * 3
    assert {name: inputs_of(find(name)) for name in BUILTIN} == dict.fromkeys(BUILTIN, "pixels")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (np.zeros((3, 4, 4), np.uint8), "reads clean latents, an array of floats, and got an array of uint8"),
        (None, "got a NoneType"),
        (np.array([1.0, math.nan]), "NaN or infinite"),
        (np.zeros((0, 4), np.float32), "empty"),
    ],
)
def test_what_is_no_latents_is_refused(given, words):
    assert words in str(as_reward(quiet)(RewardSample(given)).error)


def test_latents_cannot_be_scored_as_frames_or_beside_a_picture():
    with pytest.raises(RewardError, match="no frames"):
        VideoReward(Loud())
    with pytest.raises(RewardError, match="reward.several"):
        load("combine", parts=[{"reward": "shapes"}, {"reward": Loud()}])


def test_a_reward_that_reads_something_else_is_refused():
    with pytest.raises(RewardConfigError, match=r"'Odd'.*is none of \('pixels', 'latents'\)"):

        class Odd(Reward):
            def inputs(self):
                return []
