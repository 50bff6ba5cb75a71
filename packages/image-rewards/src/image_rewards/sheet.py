"""Pictures with their scores in one HTML file: a contact sheet of one reward, or several rewards side by side."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image

from .base import RewardResult, RewardSample

THUMBNAIL = 240  # pixels of the longer side

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #767676; }
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
    return _page(title, summary, "", f"<main>\n{cards}\n</main>")


_BESIDE = """
form { margin: 0 0 1rem; } form label { margin-right: 1rem; cursor: pointer; white-space: nowrap; }
table { width: 100%; border-spacing: 0; font-size: 12px; font-variant-numeric: tabular-nums; } td { padding: .1rem 0; }
main { grid-template-columns: repeat(auto-fill, minmax(230px, 1fr)); } table + div { margin-top: .4rem; }
td:nth-child(2) { text-align: right; padding-left: .6rem; white-space: nowrap; }
td:nth-child(3) { width: 18%; padding-left: .6rem; }
i { display: block; height: 6px; border-radius: 3px; background: #4a7fb5; min-width: 2px; }
"""
_ORDER = """
const cards = [...document.querySelectorAll("figure")];
document.forms[0].addEventListener("change", event => {
  const place = card => Number(card.dataset.places.split(" ")[event.target.value]);
  document.querySelector("main").append(...cards.sort((a, b) => place(a) - place(b)));
});
"""


def side_by_side(
    samples: Sequence[RewardSample], results: Mapping[str, Sequence[RewardResult]], title: str, kept: Sequence[str] = ()
) -> str:
    """Every picture with the scores of several rewards, as HTML with the pictures inside; a choice orders them by one of them.

    Args:
        samples: what was scored.
        results: of each reward, in the order of the samples. A bar reaches from that reward's lowest score here to its highest.
        title: of the page.
        kept: `thumbnail` of each sample, where the pictures themselves are not at hand any more.
    """
    orders = [by_score(of_one) for of_one in results.values()]
    places = [{sample: place for place, sample in enumerate(order)} for order in orders]
    spans = {name: [r.score for r in of_one if r.ok] for name, of_one in results.items()}
    cards = []
    for i in orders[0]:
        rows = "".join(_row(name, of_one[i], spans[name]) for name, of_one in results.items())
        picture = kept[i] if kept else thumbnail(samples[i].image)
        said = f"<div>{html.escape(samples[i].prompt)}</div>{html.escape(samples[i].uid or str(samples[i].index))}"
        where = " ".join(str(place[i]) for place in places)
        caption = f"<figcaption><table>{rows}</table>{said}</figcaption>"
        cards.append(f'<figure data-places="{where}">{picture}{caption}</figure>')
    choices = "".join(
        f'<label><input type="radio" name="by" value="{i}"{" checked" if i == 0 else ""}> {html.escape(name)}</label>'
        for i, name in enumerate(results)
    )
    body = f"<form>best first by {choices}</form>\n<main>\n" + "\n".join(cards) + f"\n</main><script>{_ORDER}</script>"
    return _page(title, f"{len(samples)} pictures, {len(results)} rewards", _BESIDE, body)


def _row(name: str, result: RewardResult, span: Sequence[float]) -> str:
    """A reward's score of one picture, and where it lies between that reward's lowest and highest."""
    if not result.ok:
        why = html.escape((result.error or "").splitlines()[0])
        return f'<tr><td>{html.escape(name)}</td><td colspan="2" class="error" title="{why}">no score</td></tr>'
    low, high = min(span), max(span)
    share = (result.score - low) / (high - low) if high > low else 1.0
    parts = html.escape(", ".join(f"{key} {value:.4g}" for key, value in result.components.items()))
    bar = f'<i style="width:{share:.0%}"></i>'
    return f'<tr title="{parts}"><td>{html.escape(name)}</td><td>{result.score:.4g}</td><td>{bar}</td></tr>'


def _page(title: str, summary: str, style: str, body: str) -> str:
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_STYLE}{style}</style></head>\n'
        f"<body><h1>{html.escape(title)}</h1><p>{html.escape(summary)}</p>\n{body}\n</body></html>\n"
    )


def _card(sample: RewardSample, result: RewardResult) -> str:
    name = html.escape(sample.uid or str(sample.index))
    if result.ok:
        parts = "".join(f"<dt>{html.escape(k)}</dt><dd>{v:.4g}</dd>" for k, v in result.components.items())
        body = f"<b>{result.score:.4g}</b><dl>{parts}</dl>"
    else:
        body = f'<b>no score</b><div class="error">{html.escape((result.error or "").splitlines()[0])}</div>'
    caption = f"{body}<div>{html.escape(sample.prompt)}</div>{name}"
    return f"<figure>{thumbnail(sample.image)}<figcaption>{caption}</figcaption></figure>"


def thumbnail(image: object) -> str:
    """A small copy as an <img>; of a video its middle frame. Empty where there are no pixels."""
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
