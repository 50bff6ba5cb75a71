"""A contact sheet: every picture with its score and parts, best first, failures last, in one HTML file."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

from .base import RewardResult, RewardSample

THUMBNAIL = 240  # pixels of the longer side

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8889; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0 0 .2rem; } p { color: var(--soft); margin: 0 0 1.5rem; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(200px, 1fr)); gap: 1rem; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 8px; overflow: hidden; }
img { width: 100%; aspect-ratio: 1; object-fit: contain; background: #8881; display: block; image-rendering: auto; }
img.small { image-rendering: pixelated; }
figcaption { padding: .6rem .7rem; overflow-wrap: anywhere; } b { font-size: 1.05rem; }
dl { display: grid; grid-template-columns: 1fr auto; margin: .4rem 0 0; font-size: 12px; color: var(--soft); }
dd { margin: 0; font-variant-numeric: tabular-nums; } .error { color: #c33; font-size: 12px; }
"""


def by_score(results: Sequence[RewardResult]) -> list[int]:
    """Positions from the best score to the worst; failures last; ties keep their order."""
    return sorted(range(len(results)), key=lambda i: (not results[i].ok, -results[i].score if results[i].ok else 0.0))


def contact_sheet(samples: Sequence[RewardSample], results: Sequence[RewardResult], title: str) -> str:
    """The sheet as HTML, with the pictures inside: the file can be mailed. All texts are escaped."""
    good = [r.score for r in results if r.ok]
    summary = f"{len(results)} pictures, {len(results) - len(good)} without a score"
    if good:
        summary += f"; mean {math.fsum(good) / len(good):.4g}, best {max(good):.4g}, worst {min(good):.4g}"
    cards = "\n".join(_card(samples[i], results[i]) for i in by_score(results))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1><p>{html.escape(summary)}</p>\n"
        f"<main>\n{cards}\n</main></body></html>\n"
    )


def _card(sample: RewardSample, result: RewardResult) -> str:
    name = html.escape(sample.uid or str(sample.index))
    if result.ok:
        parts = "".join(f"<dt>{html.escape(k)}</dt><dd>{v:.4g}</dd>" for k, v in result.components.items())
        body = f"<b>{result.score:.4g}</b><dl>{parts}</dl>"
    else:
        body = f'<b>no score</b><div class="error">{html.escape((result.error or "").splitlines()[0])}</div>'
    caption = f"{body}<div>{html.escape(sample.prompt)}</div>{name}"
    return f"<figure>{_thumbnail(sample.image)}<figcaption>{caption}</figcaption></figure>"


def _thumbnail(image: object) -> str:
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim not in (3, 4) or 0 in image.shape:
        return ""
    frame = image if image.ndim == 3 else image[len(image) // 2]
    if frame.shape[0] != 3:
        return ""
    small = max(frame.shape[1:]) <= 128
    picture = Image.fromarray(np.ascontiguousarray(frame.transpose(1, 2, 0)))
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG" if small else "JPEG", **({} if small else {"quality": 85}))
    kind = "png" if small else "jpeg"
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img{" class=small" if small else ""} alt="" src="data:image/{kind};base64,{data}">'
