"""`ocr`: reading clean words, and every kind of target."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from image_rewards import MissingExtraError, RewardSample, RewardTargetError, load
from image_rewards.ocr import ReadLine, reading_order
from image_rewards.targets import check_prompts
from image_rewards.text import edit_distance, match_texts, normalize, targets_of
from PIL import Image, ImageDraw, ImageFont

WORDS = """
OPEN coffee Garden station music window Hello night River FLOWER bread Market Planet summer tiger
Bridge yellow ocean Silver dream exit Winter Castle orange forest Theatre LONDON museum bakery
pepper Rocket guitar HOTEL library Sunday mountain KITCHEN taxi Police school number ticket WELCOME
closed doctor engine butter velvet
""".split()  # noqa: SIM905


def font_faces():
    """Three faces that exist everywhere the tests run: Pillow's own and two of the system's or of OpenCV's."""
    dejavu = Path("/usr/share/fonts/truetype/dejavu")
    if (dejavu / "DejaVuSerif.ttf").exists() and (dejavu / "DejaVuSansMono.ttf").exists():
        return ["aileron", dejavu / "DejaVuSerif.ttf", dejavu / "DejaVuSansMono.ttf"]
    return ["aileron", "hershey-duplex", "hershey-complex"]


def draw(text, face="aileron", size=24, canvas=(160, 96), ink=(20, 20, 20), paper=(255, 255, 255)):
    """uint8 [3,H,W] with `text` in the middle."""
    width, height = canvas
    if str(face).startswith("hershey"):
        import cv2

        picture = np.full((height, width, 3), paper, np.uint8)
        kind = cv2.FONT_HERSHEY_DUPLEX if face.endswith("duplex") else cv2.FONT_HERSHEY_COMPLEX
        (w, h), _ = cv2.getTextSize(text, kind, size / 30, 1)
        cv2.putText(picture, text, ((width - w) // 2, (height + h) // 2), kind, size / 30, ink, 1, cv2.LINE_AA)
        return picture.transpose(2, 0, 1).copy()
    font = ImageFont.load_default(size) if face == "aileron" else ImageFont.truetype(str(face), size)
    image = Image.new("RGB", canvas, paper)
    pen = ImageDraw.Draw(image)
    left, top, right, bottom = pen.multiline_textbbox((0, 0), text, font=font)
    pen.multiline_text(((width - right - left) / 2, (height - bottom - top) / 2), text, font=font, fill=ink)
    return np.asarray(image).transpose(2, 0, 1).copy()


@pytest.fixture(scope="module")
def ocr():
    pytest.importorskip("rapidocr")
    return load("ocr")


@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.nightly)])
def test_clean_words_in_three_fonts_and_sizes(ocr, count):
    rng = np.random.default_rng(0)
    samples = []
    for i in range(count):
        word, face, size = WORDS[rng.integers(len(WORDS))], font_faces()[i % 3], (16, 22, 30)[i // 3 % 3]
        ink, paper = ((20, 20, 20), (255, 255, 255)) if i % 2 else ((245, 240, 200), (30, 45, 70))
        samples.append(RewardSample(draw(word, face, size, ink=ink, paper=paper), metadata={"text": word}, index=i))
    results = load("ocr", ignore_case=False).score(samples)
    wrong = [s.metadata["text"] for s, r in zip(samples, results, strict=True) if r.components["exact"] != 1]
    print(f"exact {1 - len(wrong) / count:.3f}; wrong: {wrong}")
    assert len(wrong) <= count // 20
    order = rng.permutation(count)[:5]
    assert ocr.score([samples[i] for i in order]) == [ocr(samples[i]) for i in order]


def test_wrong_missing_and_blank_text(ocr):
    picture = draw("OPEN")
    right, near, wrong = (ocr(RewardSample(picture, metadata={"text": t})) for t in ("OPEN", "OPEL", "music"))
    assert right.score == 1.0
    assert near.components["edit"] == 0.75
    assert near.score == 0.375
    assert wrong.components["edit"] == 0.0
    assert wrong.components["extra"] == 1.0
    blank = ocr(RewardSample(np.full((3, 96, 160), 255, np.uint8), metadata={"text": "OPEN"}))
    assert (blank.score, blank.components["lines"], blank.components["blank"]) == (0.0, 0.0, 1.0)


def test_prompts_quotes_and_several_lines(ocr):
    picture = draw("OPEN\nmusic", size=26, canvas=(160, 128))
    for prompt in ('a sign that says "OPEN" and "music"', "a door, “music” above “open”"):
        assert ocr(RewardSample(picture, prompt)).score == 1.0, prompt
    assert ocr(RewardSample(picture, metadata={"text": "open\nmusic"})).score == 1.0
    assert ocr(RewardSample(picture, metadata={"text": ["open", "open"]})).components["exact"] == 0.0
    assert ocr(RewardSample(picture, metadata={"text": "open"})).components["extra"] == pytest.approx(5 / 9)


def test_letters_that_the_engine_lacks_are_refused_before_training(ocr):
    ocr.check_target("", {"text": "茶馆 №5 café"})
    with pytest.raises(RewardTargetError, match="cannot read"):
        ocr.check_target("", {"text": "བོད"})
    result = ocr(RewardSample(draw("OPEN"), metadata={"text": "བོད"}))
    assert result.error is not None
    assert result.error.startswith("RewardTargetError")


def test_tiny_and_odd_pictures_do_not_crash(ocr):
    for shape in ((3, 1, 1), (3, 1, 3000), (3, 6, 3000), (3, 3000, 8), (3, 5, 5)):
        assert ocr(RewardSample(np.zeros(shape, np.uint8), metadata={"text": "x"})).score == 0.0
    assert ocr(RewardSample(draw("OPEN", size=110, canvas=(1600, 400)), metadata={"text": "OPEN"})).score == 1.0
    assert ocr(RewardSample(draw("OPEN", size=20, canvas=(400, 30)), metadata={"text": "OPEN"})).score == 1.0


def test_video_of_words(ocr):
    frames = np.stack([draw("OPEN"), draw("music")])
    assert load("ocr", video="mean")(RewardSample(frames, metadata={"text": "OPEN"})).score == 0.5
    assert load("ocr", video="max")(RewardSample(frames, metadata={"text": "OPEN"})).score == 1.0


@pytest.mark.parametrize(
    ("prompt", "metadata", "expected"),
    [
        ("", {"text": "OPEN"}, ["OPEN"]),
        ("", {"text": ["a", "b c"]}, ["a", "b c"]),
        ("", {"text": '"OPEN"'}, ["OPEN"]),
        ("", {"text": "“OPEN”"}, ["OPEN"]),
        ("", {"text": 'say "hi" and "bye"'}, ['say "hi" and "bye"']),
        ("", {"text": '"hi" and "bye"'}, ['"hi" and "bye"']),
        ("", {"text": "it's"}, ["it's"]),
        ('a sign "OPEN 24h"', {}, ["OPEN 24h"]),
        ("„Guten Tag“ und «bonjour»", {}, ["Guten Tag", "bonjour"]),
        ("招牌「茶馆」", {}, ["茶馆"]),
        ("a shop called 'Tea' in Anna's street", {}, ["Tea"]),
        ('the "quoted" one', {"text": "metadata wins"}, ["metadata wins"]),
    ],
)
def test_targets(prompt, metadata, expected):
    assert targets_of(prompt, metadata) == expected


@pytest.mark.parametrize(
    ("prompt", "metadata", "words"),
    [
        ("a cat", {}, "no part in quotes"),
        ("Anna's cat's toy", {}, "no part in quotes"),
        ('a sign ""', {}, "empty"),
        ("", {"text": ""}, "empty"),
        ("", {"text": " \n\u200b"}, "empty"),
        ("", {"text": []}, "not empty"),
        ("", {"text": 5}, "text=5"),
        ("", {"text": ["a", None]}, "list of strings"),
    ],
)
def test_unusable_targets(prompt, metadata, words):
    with pytest.raises(RewardTargetError, match=words):
        targets_of(prompt, metadata)


def test_normalization():
    assert normalize("ＯＰＥＮ") == "open"
    assert normalize("cafe\u0301") == normalize("café")
    assert normalize("STRASSE") == normalize("straße")
    assert normalize("it’s – “ok”") == 'it\'s-"ok"'
    assert normalize("a b\n\tc\u200b\ufeff") == "abc"
    assert normalize("Open", ignore_case=False) == "Open"


def test_edit_distance_against_the_recursive_definition():
    def slow(a, b):
        if not a or not b:
            return len(a) + len(b)
        return min(slow(a[1:], b) + 1, slow(a, b[1:]) + 1, slow(a[1:], b[1:]) + (a[0] != b[0]))

    rng = np.random.default_rng(0)
    for _ in range(60):
        a, b = ("".join(rng.choice(list("abc"), rng.integers(0, 6))) for _ in range(2))
        assert edit_distance(a, b) == slow(a, b)


def test_matching_does_not_care_how_the_engine_cuts():
    for words in (["open", "24h"], ["open24h"], ["op", "en", "24", "h"]):
        match = match_texts(["OPEN 24h"], words)
        assert (match.exact, match.edit, match.extra) == (1.0, 1.0, 0.0), words
    assert match_texts(["cat"], ["concatenate"]).exact == 0.0
    assert match_texts(["a", "a"], ["a"]).edit == 0.5
    assert match_texts(["long text", "text"], ["text", "long", "text"]).exact == 1.0
    assert match_texts(["x"], []).edit == 0.0


def test_reading_order_is_by_rows():
    def line(text, x, y):
        return ReadLine(text, 1.0, (x, y, x + 10, y + 10))

    lines = [line("d", 50, 32), line("b", 50, 3), line("c", 0, 30), line("a", 0, 0)]
    assert [x.text for x in reading_order(lines)] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    "prompt",
    [
        'a 24" monitor and a 27" monitor',
        'a 12 " pizza and a 14 " pizza',
        'a 24"x36" poster and a 5½" nail',
        "a 5'10\" man and a 6'2\" man",
        "a tv of 24'' and a tv of 27''",
        "6' tall and 7' wide, 6 ' and 7 ' deep",
        "rock 'n' roll",
        "fish ‘n’ chips",
        "Rock 'N' Roll band",
        "the '90s and the '80s music",
        "'tis the season of the dogs' bowls",
        "dogs' bowls and cats' toys, it's 5 o'clock",
    ],
)
def test_inches_feet_and_apostrophes_are_no_quotes(prompt):
    with pytest.raises(RewardTargetError, match="no part in quotes"):
        targets_of(prompt, {})
    assert targets_of(f'{prompt}, with the words "GO 24" and "STOP"', {}) == ["GO 24", "STOP"]


@pytest.mark.parametrize(
    ("prompt", "target"),
    [
        ("a sign 'don't walk' here", "don't walk"),
        ("a sign ‘don’t walk’ here", "don’t walk"),
        ("the letter 'N' on a door", "N"),
        ('a door with "24" on it', "24"),
        ('a 24" tv that shows "SALE"', "SALE"),
        ('写着"你好"的牌子', "你好"),
    ],
)
def test_quotes_with_numbers_and_apostrophes_in_them(prompt, target):
    assert targets_of(prompt, {}) == [target]


@pytest.mark.parametrize("letter", ["1", "t", "f", "j", "J", "7", "A", "it", "11"])
@pytest.mark.parametrize("size", [30, 48])
def test_narrow_texts_are_read_upright(ocr, letter, size):
    picture = draw(letter, size=size, canvas=(256, 128))
    assert ocr(RewardSample(picture, "", {"text": letter})).components["exact"] == 1


@pytest.mark.parametrize("letter", ["I", "l", "i", "!", "|", "一", "-", "ll", "l!", "."])
def test_targets_of_bare_strokes_are_refused(ocr, letter):
    with pytest.raises(RewardTargetError, match="cannot tell I, l, 1"):
        ocr.check_target("", {"text": ["fine", letter]})


def test_prompts_are_checked_with_file_and_line():
    class Quoted:
        def check_target(self, prompt, metadata):
            targets_of(prompt, metadata)

    rows = [("f, line 1", 'a "b"', {}), ("f, line 2", "nothing", {}), ("f, line 3", "x", {"text": ""})]
    with pytest.raises(RewardTargetError) as caught:
        check_prompts(Quoted(), rows)
    assert "f, line 2:" in str(caught.value)
    assert "f, line 3:" in str(caught.value)
    assert "f, line 1:" not in str(caught.value)
    check_prompts(Quoted(), rows[:1])


def test_a_missing_engine_names_the_install_command(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(
        MissingExtraError, match=r"uv run --extra ocr …, or pip install './packages/image-rewards\[ocr\]'"
    ):
        load("ocr").check_target("", {"text": "x"})
