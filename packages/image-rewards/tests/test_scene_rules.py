"""GenEval's questions: the rules on made-up detections, and on drawn scenes read from pixels."""

from __future__ import annotations

import pytest
from image_rewards import RewardSample, RewardTargetError, load
from image_rewards.scene_rules import Found, judge, parse_questions, relations_between

NAMES, COLORS = ("dog", "cat", "bench"), ("red", "blue")


def at(x, y, size=10.0):
    return (x - size / 2, y - size / 2, x + size / 2, y + size / 2)


def ask(include, exclude=()):
    return parse_questions({"include": include, "exclude": list(exclude)}, NAMES, COLORS)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (at(0, 0), at(100, 0), {"left of"}),
        (at(100, 0), at(0, 0), {"right of"}),
        (at(0, 0), at(0, 100), {"above"}),
        (at(0, 100), at(0, 0), {"below"}),
        (at(0, 0), at(100, 100), {"left of", "above"}),
        (at(0, 0), at(0, 0), set()),
        (at(0, 0, 100), at(15, 0, 100), set()),  # overlapping by more than the slack
        (at(0, 0), at(100, 40), {"left of"}),  # mostly beside, so not above
    ],
)
def test_relations(a, b, expected):
    assert relations_between(a, b) == expected


def test_presence_and_counting():
    two = [Found("dog", at(0, 0)), Found("dog", at(50, 0)), Found("cat", at(90, 0))]
    assert judge(two, ask([{"class": "dog", "count": 2}]))["strict"] == 1
    assert judge(two, ask([{"class": "dog"}, {"class": "cat"}]))["strict"] == 1
    short = judge(two, ask([{"class": "dog", "count": 3}]))
    assert short["strict"] == 0
    assert short["count"] == pytest.approx(2 / 3)
    exactly_one = ask([{"class": "dog", "count": 1}], [{"class": "dog", "count": 2}])
    assert judge(two, exactly_one)["strict"] == 0
    assert judge(two[1:], exactly_one)["strict"] == 1
    assert judge([], ask([{"class": "dog"}])) == {"strict": 0.0, "count": 0.0, "parts": 0.0}


def test_the_most_confident_objects_count():
    found = [Found("dog", at(0, 0), 0.4, "red"), Found("dog", at(50, 0), 0.9, "blue")]
    assert judge(found, ask([{"class": "dog", "color": "blue"}]))["strict"] == 1
    assert judge(found, ask([{"class": "dog", "color": "red"}]))["strict"] == 0
    equal = [Found("dog", at(0, 0), 1.0, "red"), Found("dog", at(50, 0), 1.0, "blue")]
    for color in COLORS:
        assert judge(equal, ask([{"class": "dog", "color": color}]))["strict"] == 1


def test_positions_need_their_target():
    include = [{"class": "dog"}, {"class": "cat", "position": ["left of", 0]}]
    dog, left, right = Found("dog", at(50, 0)), Found("cat", at(0, 0)), Found("cat", at(100, 0))
    assert judge([dog, left], ask(include))["strict"] == 1
    wrong = judge([dog, right], ask(include))
    assert (wrong["strict"], wrong["position"], wrong["count"]) == (0, 0, 1)
    assert judge([left], ask(include))["position"] == 0


@pytest.mark.parametrize(
    ("include", "words"),
    [
        (None, "no 'include'"),
        ([], "at least one"),
        ("dog", "list of objects"),
        ([{"count": 1}], "of the form"),
        ([{"class": "unicorn"}], "class='unicorn'"),
        ([{"class": "dog", "count": 0}], "count=0"),
        ([{"class": "dog", "color": "mauve"}], "color='mauve'"),
        ([{"class": "dog", "colour": "red"}], "unknown key 'colour'"),
        ([{"class": "dog"}, {"class": "cat", "position": "left of"}], "must be \\[RELATION"),
        ([{"class": "dog"}, {"class": "cat", "position": ["near", 0]}], "'near' is unknown"),
        ([{"class": "dog", "position": ["left of", 0]}], "before it"),
    ],
)
def test_questions_that_cannot_be_asked(include, words):
    with pytest.raises(RewardTargetError, match=words):
        parse_questions({"include": include}, NAMES, COLORS)


def test_drawn_scenes(paint):
    red_left = paint([("red", "circle", 16, 32, 9), ("blue", "square", 48, 32, 9)], "white")
    ask_left = {"include": [{"class": "square", "color": "blue"}, {"class": "circle", "position": ["left of", 0]}]}
    reward = load("shapes")
    right = reward(RewardSample(red_left, "", {**ask_left, "background": "white"}))
    assert right.score == 1.0
    assert right.components["position"] == 1.0
    mirrored = reward(RewardSample(red_left[:, :, ::-1].copy(), "", ask_left))
    assert mirrored.components["strict"] == mirrored.components["position"] == 0.0
    assert mirrored.components["parts"] == pytest.approx(2 / 3)
    swapped = paint([("blue", "circle", 16, 32, 9), ("red", "square", 48, 32, 9)], "white")
    assert reward(RewardSample(swapped, "", ask_left)).components["color"] == 0.0
    dark = reward(RewardSample(red_left, "", {**ask_left, "background": "black"}))
    assert dark.components["strict"] == dark.components["background"] == 0.0
    with pytest.raises(RewardTargetError, match="class='cat'"):
        reward.check_target("", {"include": [{"class": "cat"}]})
    with pytest.raises(RewardTargetError, match="background='green'"):
        reward.check_target("", {**ask_left, "background": "green"})
