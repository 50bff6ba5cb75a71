"""Pictures of a validation: where each lies, what is kept with it, and the statistics over them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from PIL import Image
from run_report import (
    ReportError,
    compare,
    load_validations,
    save_validation,
    summarize,
    truncate_validations,
)
from run_report.stats import paired_rows


def record(uid="a", seed=0, reward=0.5, prompt=None, **components):
    return {"prompt": prompt or f"prompt {uid}", "seed": seed, "uid": uid, "reward": reward, "components": components}


def pictures(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def pixels(image):
    return np.asarray(image).transpose(2, 0, 1)


def test_every_picture_lies_where_its_record_says(tmp_path):
    images = pictures(5, 3, 16, 24)
    records = [record("a", 7), record("b", 7), record("a", 8), record("b", 8), record("c", 7, reward=1.0, strict=1.0)]
    folder = save_validation(tmp_path, 40, images, records)
    assert folder == tmp_path / "samples/step_000040"
    (validation,) = load_validations(tmp_path)
    assert (validation.step, validation.rows, validation.columns, validation.tile) == (40, 3, 2, (24, 16))
    places = [(r.uid, r.seed, r.row, r.column) for r in validation.records]
    assert places == [("a", 7, 0, 0), ("b", 7, 1, 0), ("a", 8, 0, 1), ("b", 8, 1, 1), ("c", 7, 2, 0)]
    for image, r in zip(images, validation.records, strict=True):
        np.testing.assert_array_equal(pixels(validation.picture(r.row, r.column)), image)
    assert [r.strict for r in validation.records] == [None, None, None, None, True]


def test_equal_prompts_with_different_uids_stay_apart(tmp_path):
    save_validation(tmp_path, 0, pictures(2, 3, 8, 8), [record("a", prompt="same"), record("b", prompt="same")])
    assert load_validations(tmp_path)[0].rows == 2


def test_large_pictures_are_scaled_in_the_grid_and_kept_whole(tmp_path):
    images = pictures(2, 3, 300, 600)
    folder = save_validation(tmp_path, 1, images, [record("a"), record("b")])
    (validation,) = load_validations(tmp_path)
    assert validation.tile == (256, 128)
    with Image.open(folder / "full/0001.png") as whole:
        np.testing.assert_array_equal(pixels(whole), images[1])


def test_a_video_shows_first_middle_and_last_frame(tmp_path):
    images = pictures(1, 9, 3, 8, 8)
    save_validation(tmp_path, 1, images, [record()])
    (validation,) = load_validations(tmp_path)
    strip = np.concatenate([images[0, 0], images[0, 4], images[0, 8]], axis=2)
    np.testing.assert_array_equal(pixels(validation.picture(0, 0)), strip)
    assert validation.frames == 9


def test_grey_pictures_and_failed_rewards_are_kept(tmp_path):
    save_validation(tmp_path, 1, pictures(1, 1, 8, 8), [record(reward=math.nan, strict=math.nan)])
    (validation,) = load_validations(tmp_path)
    assert math.isnan(validation.records[0].reward)
    assert validation.picture(0, 0).mode == "RGB"
    assert math.isnan(summarize(validation)["reward"].mean)


@pytest.mark.parametrize(
    ("images", "records", "message"),
    [
        (np.zeros((1, 3, 8, 8), np.float32), [record()], "uint8"),
        (np.zeros((1, 8, 8, 3), np.uint8), [record()], "C = 1 or 3"),
        (np.zeros((2, 3, 8, 8), np.uint8), [record()], "1 records for 2 images"),
        (np.zeros((1, 3, 8, 8), np.uint8), [{"prompt": "x"}], "lacks"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(tmp_path, images, records, message):
    with pytest.raises(ReportError, match=message):
        save_validation(tmp_path, 1, images, records)
    assert not (tmp_path / "samples").exists()


def test_a_validation_of_the_same_step_is_replaced(tmp_path):
    save_validation(tmp_path, 1, pictures(2, 3, 8, 8), [record("a"), record("b")])
    save_validation(tmp_path, 1, pictures(1, 3, 8, 8), [record("a")])
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step_000001"]
    assert len(load_validations(tmp_path)[0].records) == 1


def test_truncate_drops_later_validations(tmp_path):
    for step in (0, 20, 40):
        save_validation(tmp_path, step, pictures(1, 3, 8, 8), [record()])
    assert truncate_validations(tmp_path, 20) == 1
    assert [v.step for v in load_validations(tmp_path)] == [0, 20]


def test_a_broken_index_names_the_folder(tmp_path):
    folder = save_validation(tmp_path, 3, pictures(1, 3, 8, 8), [record()])
    (folder / "index.json").write_text('{"step": 3}')
    with pytest.raises(ReportError, match="step_000003"):
        load_validations(tmp_path)


def test_errors_are_clustered_by_prompt_and_differences_paired(tmp_path):
    """Two prompts, two seeds: per-prompt means 0.25 and 0.75 before, 0.75 and 1.25 after, computed by hand."""
    before = [record("a", 0, 0.0), record("a", 1, 0.5), record("b", 0, 0.5), record("b", 1, 1.0)]
    after = [record("a", 0, 0.5), record("a", 1, 1.0), record("b", 0, 1.0), record("b", 1, 1.5)]
    for step, records in ((0, before), (9, after)):
        save_validation(tmp_path, step, pictures(4, 3, 8, 8), records)
    first, last = load_validations(tmp_path)
    (change,) = compare(first, last)
    assert change.before.mean == pytest.approx(0.5)
    assert change.before.stderr == pytest.approx(0.25)  # sd of (0.25, 0.75) is 0.3536, over sqrt(2)
    assert change.difference.mean == pytest.approx(0.5)
    assert change.difference.stderr == pytest.approx(0.0)  # every prompt rose by the same
    assert math.isnan(change.z)


def test_rows_pair_by_prompt_and_seeds_whatever_the_uids(tmp_path):
    save_validation(tmp_path, 0, pictures(2, 3, 8, 8), [record("x1", 5, prompt="p"), record("x2", 5, prompt="q")])
    save_validation(tmp_path, 1, pictures(2, 3, 8, 8), [record("y1", 5, prompt="q"), record("y2", 6, prompt="p")])
    first, last = load_validations(tmp_path)
    assert paired_rows(first, last) == {1: 0}  # "p" has another seed, so it is another picture
