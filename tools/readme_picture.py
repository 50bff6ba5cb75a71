"""The picture of the README, made of a run's own samples: first validation left, last right, green frames where all is right.

uv run python tools/readme_picture.py RUN docs/before_after.png
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from run_report.errors import ReportError
from run_report.gallery import SampleRecord, Validation, load_validations
from run_report.pictures import MAX_COLUMNS, evenly
from run_report.stats import paired_rows, summarize

_SCALE = 2  # drawn for screens of double density
_INK, _SOFT, _RAIL, _OK, _PAGE = (23, 25, 30), (112, 118, 130), (220, 220, 214), (24, 154, 82), (255, 255, 255)
_TILE, _GAP, _LABEL, _MIDDLE, _MARGIN, _HEAD = 52, 8, 196, 44, 24, 66


def before_after_png(run_dir: str | os.PathLike[str], path: str | os.PathLike[str], *, prompts: int = 10) -> Path:
    """Draw `prompts` evenly picked prompts: first validation left, last right, green frames where all is right.

    Raises:
        ReportError: the run has fewer than two validations, or they share no prompt.
    """
    validations = load_validations(run_dir)
    if len(validations) < 2:
        raise ReportError(f"{str(run_dir)!r} has {len(validations)} validation(s); a before/after picture needs two")
    before, after = validations[0], validations[-1]
    pairs = paired_rows(before, after)
    rows = evenly(sorted(pairs), prompts)
    if not rows:
        raise ReportError(f"validations {before.step} and {after.step} share no prompt with the same seeds")
    columns = min(before.columns, after.columns, MAX_COLUMNS)
    tile_w, tile_h = round(_TILE * max(1.0, before.tile[0] / before.tile[1])), _TILE
    side = columns * (tile_w + _GAP) - _GAP
    width = 2 * _MARGIN + _LABEL + 2 * side + _MIDDLE
    height = _HEAD + len(rows) * (tile_h + _GAP + 2) + _MARGIN - _GAP
    canvas = Image.new("RGB", (width * _SCALE, height * _SCALE), _PAGE)
    draw = ImageDraw.Draw(canvas)
    lefts = (_MARGIN + _LABEL, _MARGIN + _LABEL + side + _MIDDLE)
    for left, validation, title in zip(lefts, (before, after), ("before", "after"), strict=True):
        _text(draw, left, 20, title, 17, _INK)
        _text(draw, left, 42, _caption(validation), 12.5, _SOFT)
    for index, row in enumerate(rows):
        top = _HEAD + index * (tile_h + _GAP + 2)
        prompt = before.prompts[row]
        for number, line in enumerate(_wrapped(prompt, 12.5, _LABEL - 22)[:3]):
            lines = min(3, len(_wrapped(prompt, 12.5, _LABEL - 22)))
            _text(draw, _MARGIN, top + tile_h / 2 - 8 * lines + 16 * number, line, 12.5, _INK)
        middle, centre = lefts[0] + side + _MIDDLE / 2, top + tile_h / 2
        _arrow(draw, middle, centre)
        for left, validation, line_row in ((lefts[0], before, row), (lefts[1], after, pairs[row])):
            for column in range(columns):
                record = validation.by_place.get((line_row, column))
                if record is not None:
                    picture = validation.picture(line_row, column)
                    _place(canvas, picture, record, left + column * (tile_w + _GAP), top, tile_w, tile_h)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    canvas.save(target, optimize=True)
    return target


def _caption(validation: Validation) -> str:
    summary = summarize(validation)
    name = "strict" if "strict" in summary else "reward"
    value = summary[name]
    if name == "strict":
        return f"strictly right {100 * value.mean:.1f} % ± {100 * value.stderr:.1f}, {validation.rows} held-out prompts"
    return f"reward {value.mean:.3f} ± {value.stderr:.3f}, {validation.rows} held-out prompts"


def _place(
    canvas: Image.Image, picture: Image.Image, record: SampleRecord, x: float, y: float, width: int, height: int
) -> None:
    """A tile with round corners and its frame; drawn at four times the size so that the curves are smooth."""
    fine = 4
    size = (width * _SCALE, height * _SCALE)
    mask = Image.new("L", (size[0] * fine, size[1] * fine), 0)
    radius = 5 * _SCALE * fine
    box = (0, 0, mask.width - 1, mask.height - 1)
    ImageDraw.Draw(mask).rounded_rectangle(box, radius, fill=255)
    edge = Image.new("L", mask.size, 0)
    line = (5 if record.strict else 2) * fine
    ImageDraw.Draw(edge).rounded_rectangle(box, radius, outline=255, width=line)
    tile = picture.resize(size, Image.Resampling.LANCZOS)
    tile.paste(_OK if record.strict else _RAIL, (0, 0), edge.resize(size, Image.Resampling.LANCZOS))
    canvas.paste(tile, (round(x * _SCALE), round(y * _SCALE)), mask.resize(size, Image.Resampling.LANCZOS))


def _arrow(draw: ImageDraw.ImageDraw, x: float, y: float) -> None:
    x, y, s = x * _SCALE, y * _SCALE, _SCALE
    draw.line((x - 8 * s, y, x + 8 * s, y), fill=_SOFT, width=round(1.5 * s))
    draw.line(
        (x + 3 * s, y - 5 * s, x + 8 * s, y, x + 3 * s, y + 5 * s), fill=_SOFT, width=round(1.5 * s), joint="curve"
    )


def _font(size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size * _SCALE)  # Pillow's own font: the same on every machine


def _text(draw: ImageDraw.ImageDraw, x: float, y: float, text: str, size: float, colour: tuple[int, int, int]) -> None:
    draw.text((x * _SCALE, y * _SCALE), text, font=_font(size), fill=colour)


def _wrapped(text: str, size: float, width: float) -> list[str]:
    font, lines = _font(size), [""]
    for word in text.split():
        joined = f"{lines[-1]} {word}".strip()
        if font.getlength(joined) <= width * _SCALE or not lines[-1]:
            lines[-1] = joined
        else:
            lines.append(word)
    return lines


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(before_after_png(sys.argv[1], sys.argv[2]))
