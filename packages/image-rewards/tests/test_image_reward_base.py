"""The contract every reward keeps: checked pictures, failures that are no numbers, names, sums, videos."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from dataclasses import replace

import image_rewards
import numpy as np
import pytest
from image_rewards import (
    PerSampleReward,
    RewardConfigError,
    RewardError,
    RewardInputError,
    RewardResult,
    RewardSample,
    RewardServiceError,
    UnknownRewardError,
    errors,
    load,
)
from image_rewards.video import AGGREGATES, VideoReward

GOOD = np.full((3, 16, 16), 128, np.uint8)


class Mean(PerSampleReward):
    name = "mean_of_pixels"

    def score_one(self, sample):
        return RewardResult(float(sample.image.mean()), {"mean": float(sample.image.mean())})


class Fails(PerSampleReward):
    name = "fails"

    def score_one(self, sample):
        raise RewardServiceError("the judge is away")


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (GOOD.astype(np.float32) / 255, "dtype 'float32'"),
        (np.full((3, 4, 4), np.nan), "NaN"),
        (GOOD.astype(np.int64), "dtype 'int64'"),
        (np.array([["a"]]), "dtype"),
        (GOOD.transpose(1, 2, 0), "channels first"),
        (np.zeros((1, 8, 8), np.uint8), "1 channels"),
        (np.zeros((4, 8, 8), np.uint8), "4 channels"),
        (np.zeros((8, 8), np.uint8), "shape"),
        (np.zeros((3, 0, 8), np.uint8), "empty"),
        (np.zeros((0, 3, 8, 8), np.uint8), "zero frames"),
        (np.zeros((2, 3, 8, 8), np.uint8), "video"),
        (np.broadcast_to(np.uint8(7), (3, 8192, 8192)), "limit"),
        (b"not an array", "bytes"),
        (None, "NoneType"),
    ],
)
@pytest.mark.parametrize("name", ["jpeg_compressibility", "sharpness"])
def test_pictures_nobody_can_read_fail_by_name(name, image, words):
    result = load(name)(RewardSample(image, uid="p7", index=3))
    assert math.isnan(result.score)
    assert result.error is not None
    assert "RewardInputError" in result.error
    assert words in result.error
    assert "p7[3]" in result.error
    assert not result.retryable


@pytest.mark.parametrize("name", ["jpeg_compressibility", "jpeg_incompressibility", "sharpness"])
def test_one_pixel_is_a_picture(name):
    assert load(name)(RewardSample(np.zeros((3, 1, 1), np.uint8))).ok


def test_too_many_frames():
    image = np.broadcast_to(np.uint8(7), (200, 3, 1024, 1024))
    assert "frames are more than the limit" in str(load("sharpness", video="mean")(RewardSample(image)).error)


def test_a_bad_sample_leaves_the_others_alone_and_order_stays():
    images = [GOOD + i for i in range(5)]
    samples = [RewardSample(image) for image in images]
    samples[2] = RewardSample(images[2].astype(float))
    results = Mean().score(samples)
    assert [r.ok for r in results] == [True, True, False, True, True]
    assert [r.score for r in results if r.ok] == [128.0, 129.0, 131.0, 132.0]


def test_same_picture_same_score_in_any_batch_and_order(shape_samples):
    samples = shape_samples(24)
    for name in ("shapes", "jpeg_compressibility", "sharpness"):
        reward = load(name)
        alone = [reward(s) for s in samples]
        order = np.random.default_rng(0).permutation(len(samples))
        shuffled = reward.score([samples[i] for i in order])
        assert [alone[i] for i in order] == shuffled
        fresh = [replace(s, image=np.asfortranarray(s.image)) for s in samples]  # memory layout does not matter either
        assert reward.score(fresh) == alone


def test_not_finite_is_a_failure():
    class Broken(PerSampleReward):
        name = "broken"

        def score_one(self, sample):
            return RewardResult(float("nan"))

    result = Broken()(RewardSample(GOOD))
    assert result.error is not None
    assert "nan" in result.error
    with pytest.raises(RewardError, match="finite"):
        result.unwrap()


def test_wrong_number_of_results_is_an_error():
    class Short(Mean):
        def score_valid(self, samples):
            return []

    with pytest.raises(RewardError, match="0 results for 1 samples"):
        Short()(RewardSample(GOOD))


def test_service_failures_may_be_tried_again():
    assert Fails()(RewardSample(GOOD)).retryable


def test_errors_survive_pickling_and_have_stdlib_relatives():
    for cls in vars(errors).values():
        if isinstance(cls, type) and issubclass(cls, RewardError):
            again = pickle.loads(pickle.dumps(cls("it failed", "Traceback: here")))
            assert type(again) is cls
            assert again.cause == "Traceback: here"
            assert "it failed" in str(again)
    assert issubclass(RewardInputError, ValueError)
    assert issubclass(errors.RewardTimeoutError, TimeoutError)
    assert issubclass(errors.MissingExtraError, ImportError)


def test_names_and_options_say_the_nearest():
    with pytest.raises(UnknownRewardError, match="Did you mean 'shapes'"):
        load("shape")
    with pytest.raises(RewardConfigError, match="Did you mean 'quality'"):
        load("jpeg_compressibility", qualty=50)
    with pytest.raises(RewardConfigError, match="give a function"):
        load("math:pi")
    with pytest.raises(UnknownRewardError, match="cannot be imported"):
        load("no_such_module:Reward")
    with pytest.raises(RewardConfigError, match="quality=0"):
        load("jpeg_compressibility", quality=0)


def test_a_class_by_its_path_and_entry_points(monkeypatch):
    assert load("image_rewards.jpeg:JpegCompressibility").name == "jpeg_compressibility"

    class Point:
        name, value = "theirs", "image_rewards.quality:SharpnessReward"

    monkeypatch.setattr(
        "image_rewards.registry.entry_points", lambda group: [Point] if group == "image_rewards" else []
    )
    assert load("theirs").name == "sharpness"
    assert "theirs" in image_rewards.available()


def test_importing_takes_neither_torch_nor_ray():
    code = (
        "import sys, image_rewards, image_rewards.shapes, image_rewards.jpeg, image_rewards.loop\n"
        "assert not {'torch', 'ray', 'scipy', 'cv2', 'transformers'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_jpeg_prefers_what_it_says():
    flat, noisy = GOOD, np.random.default_rng(0).integers(0, 256, GOOD.shape, dtype=np.uint8)
    small, large = load("jpeg_compressibility").score([RewardSample(flat), RewardSample(noisy)])
    assert small.score > large.score
    assert load("jpeg_incompressibility")(RewardSample(noisy)).score == -large.score > 0


def test_guards_see_blank_and_blurred():
    rng = np.random.default_rng(0)
    noisy = rng.integers(0, 256, (3, 32, 32), dtype=np.uint8)
    blurred = (noisy.reshape(3, 16, 2, 16, 2).mean((2, 4)).repeat(2, 1).repeat(2, 2)).astype(np.uint8)
    sharp, soft, blank = load("sharpness").score([RewardSample(x) for x in (noisy, blurred, GOOD.repeat(2, 1))])
    assert sharp.score > soft.score > blank.score == 0
    assert (sharp.components["blank"], blank.components["blank"]) == (0.0, 1.0)


def test_video_frames_are_combined_as_named():
    frames = np.stack([np.full((3, 4, 4), v, np.uint8) for v in (10, 20, 60)])
    expected = {"mean": 30, "min": 10, "max": 60, "median": 20, "first": 10, "last": 60}
    assert set(expected) == set(AGGREGATES)
    for how, value in expected.items():
        result = VideoReward(Mean(), how)(RewardSample(frames))
        assert result.score == value, how
        assert result.components["mean"] == value
    assert VideoReward(Mean())(RewardSample(frames[0])).score == 10  # a picture is one frame
    with pytest.raises(RewardConfigError, match="aggregate='sum'"):
        load("sharpness", video="sum")


def test_a_failing_frame_fails_the_video_with_its_number():
    class FailsOnBright(Mean):
        def score_one(self, sample):
            if sample.image.max() > 100:
                raise RewardServiceError("too bright")
            return super().score_one(sample)

    frames = np.stack([np.full((3, 4, 4), v, np.uint8) for v in (10, 20, 200)])
    result = VideoReward(FailsOnBright())(RewardSample(frames))
    assert result.error is not None
    assert result.error.startswith("frame 2:")


def test_combine_scales_weighs_and_gates():
    sample = RewardSample(np.full((3, 4, 4), 100, np.uint8))
    total = load(
        "combine",
        parts=[
            {"reward": Mean(), "weight": 2.0, "low": 0.0, "high": 200.0},
            {"reward": "sharpness", "weight": 1.0, "mean": 1.0, "std": 2.0},
        ],
    )
    result = total(sample)
    assert result.score == pytest.approx(2 * 0.5 + (0 - 1) / 2)
    assert result.components["mean_of_pixels"] == 0.5
    assert result.components["mean_of_pixels.raw"] == 100.0
    assert result.components["sharpness/blank"] == 1.0
    gate = {"reward": "sharpness", "component": "blank", "weight": 0.0, "at_most": 0.5}
    gated = load("combine", parts=[{"reward": Mean()}, gate], gated_score=-1.0)(sample)
    assert gated.score == -1.0
    assert gated.components["gated"] == 1.0
    assert load("combine", parts=[{"reward": Mean(), "clip": [0, 10]}])(sample).score == 10
    assert load("combine", parts=[{"reward": Mean()}], clip=(0, 7))(sample).score == 7


def test_combine_fails_with_a_required_part_and_says_what_an_optional_one_counts():
    sample = RewardSample(GOOD)
    required = load("combine", parts=[{"reward": Mean()}, {"reward": Fails()}])(sample)
    assert required.error is not None
    assert "part 'fails'" in required.error
    assert required.retryable
    optional = load("combine", parts=[{"reward": Mean()}, {"reward": Fails(), "required": False, "missing": 5.0}])(
        sample
    )
    assert optional.score == 133.0
    assert optional.components["missing_parts"] == 1.0
    with pytest.raises(RewardConfigError, match="missing=NUMBER"):
        load("combine", parts=[{"reward": Fails(), "required": False}])


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([], "at least one part"),
        ([{"reward": "sharpness", "wieght": 1}], "unknown key 'wieght'"),
        ([{"weight": 1}], "names no reward"),
        ([{"reward": "sharpness", "weight": 0}], "weight 0"),
        ([{"reward": "sharpness"}, {"reward": "sharpness"}], "share the name"),
        ([{"reward": "sharpness", "low": 1.0}], "go together"),
        ([{"reward": "sharpness", "low": 1.0, "high": 1.0}], "must be less"),
        ([{"reward": "sharpness", "mean": 1.0, "std": 0.0}], "must be positive"),
        ([{"reward": "sharpness", "weight": float("nan")}], "finite"),
    ],
)
def test_combine_refuses_nonsense(parts, words):
    with pytest.raises(RewardConfigError, match=words):
        load("combine", parts=parts)


def test_an_absent_component_is_named():
    result = load("combine", parts=[{"reward": "sharpness", "component": "colour"}])(RewardSample(GOOD))
    assert result.error is not None
    assert "sharpness, contrast, blank" in result.error
