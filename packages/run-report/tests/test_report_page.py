"""report.html and the live line, made from a small run."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image
from run_report import (
    LiveLine,
    MetricsWriter,
    ReportError,
    save_environment,
    save_validation,
    write_report,
)
from run_report.render import duration, number
from run_report.sprites import data_uri
from run_report.svg import Series, line_chart, nice_ticks


def validation(run, step, right, prompts=3, seeds=2, size=16, steps_seed=0):
    rng = np.random.default_rng(steps_seed)
    images = rng.integers(0, 256, (prompts * seeds, 3, size, size), dtype=np.uint8)
    records = [
        {
            "prompt": f"<b>caption</b> {p} & more",
            "seed": s,
            "uid": f"line{p}",
            "reward": float(p < right),
            "components": {"strict": float(p < right), "clean": 1.0, "off": 0.02},
        }
        for p in range(prompts)
        for s in range(seeds)
    ]
    save_validation(run, step, images, records)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "my run"
    with MetricsWriter(folder) as writer:
        for step in range(1, 31):
            row = {
                "reward/mean": 0.5 + step / 100,
                "actor/kl_loss": 1e-5 * step,
                "actor/ratio_mean": 1.0,
                "time/step": 2.0,
            }
            if step % 10 == 0:
                row |= {
                    "val/reward_mean": 0.5,
                    "val/reward_stderr": 0.02,
                    "val/strict_mean": 0.4,
                    "val/strict_stderr": 0.03,
                }
            writer.append(step, row)
    (folder / "config.yaml").write_text("trainer:\n  total_steps: 30\n  note: a <tag>\n")
    save_environment(folder, {"device": "one core"})
    for step, right in ((0, 1), (10, 2), (20, 2), (30, 3)):
        validation(folder, step, right, steps_seed=step)
    return folder


class Page(HTMLParser):
    """Collects tags and checks that they nest."""

    VOID = frozenset(("meta", "input", "br", "img", "line", "circle", "path", "polyline", "polygon"))

    def __init__(self, text):
        super().__init__()
        self.open, self.tags = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def classes(self, tag, name):
        return [attrs for t, attrs in self.tags if t == tag and name in attrs.get("class", "").split()]


def test_the_page_is_whole_self_contained_and_small(run):
    path = write_report(run)
    text = path.read_text()
    page = Page(text)
    assert path == run / "report.html"
    assert path.stat().st_size < 3_000_000
    for attribute in ("src", "href"):
        links = [attrs[attribute] for _, attrs in page.tags if attribute in attrs]
        assert all(link.startswith("#") for link in links), links
    assert re.findall(r"url\((?!data:)", text) == []
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    assert {"pictures", "numbers", "film", "curves", "prompts", "metrics", "config", "environment"} <= {
        attrs.get("id") for _, attrs in page.tags
    }


def test_the_page_shows_the_run(run):
    text = write_report(run).read_text()
    page = Page(text)
    before, after = page.classes("i", "a"), page.classes("i", "b")
    assert len(before) == len(after) == 6
    assert sum("ok" in tile["class"].split() for tile in before) == 2  # one of three prompts was right, two seeds each
    assert sum("ok" in tile["class"].split() for tile in after) == 6
    assert "33.3<small>%</small>" in text
    assert "100.0<small>%</small>" in text
    assert "a &lt;tag&gt;" in text  # config, captions and environment are escaped
    assert "<b>caption</b>" not in text
    assert "one core" in text
    titles = re.findall(r"<figcaption><b>(.*?)</b>", text)
    assert titles == ["Reward", "Strictly right", "Distance from the base model", "Policy ratio", "Seconds per step"]


@pytest.mark.parametrize("missing", ["metrics.jsonl", "samples", "config.yaml", "environment.json"])
def test_the_page_can_be_written_when_something_is_missing(run, missing):
    (run / missing).rename(run / "elsewhere")
    assert "<h1>" in write_report(run).read_text()


def test_a_run_with_one_validation_and_one_without_strict(tmp_path):
    images = np.zeros((2, 3, 8, 8), np.uint8)
    records = [{"prompt": "x", "seed": s, "uid": "x", "reward": 3.5, "components": {}} for s in range(2)]
    save_validation(tmp_path, 0, images, records)
    page = Page(write_report(tmp_path).read_text())
    assert page.classes("i", "ok") == []
    save_validation(tmp_path, 5, images, records)
    assert len(Page(write_report(tmp_path).read_text()).classes("i", "b")) == 2


@pytest.mark.parametrize("seeds", [2, pytest.param(8, marks=pytest.mark.nightly)])
def test_large_galleries_stay_under_the_limit(tmp_path, seeds):
    """Of noise, the worst case for codecs."""
    for step in (0, 1):
        validation(tmp_path, step, 3, prompts=70, seeds=seeds, size=128, steps_seed=step)
    assert write_report(tmp_path).stat().st_size < 3_000_000


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ReportError, match="nowhere"):
        write_report(tmp_path / "nowhere")


def test_charts_leave_out_what_is_not_there_and_survive_nan():
    assert line_chart("t", [Series("s", [])]) == ""
    assert line_chart("t", [Series("s", [(1, float("nan"))])]) == ""
    chart = line_chart("t", [Series("s", [(i, float("nan") if i == 3 else 1.0) for i in range(2000)], style="smooth")])
    assert "nan" not in chart
    assert len(chart) < 40_000  # binned


def test_ticks_and_numbers():
    assert nice_ticks(0.41, 0.83, 4) == [0.4, 0.6, 0.8, 1.0]
    ticks = nice_ticks(1.0, 1.0, 4)
    assert ticks[0] < 1.0 < ticks[-1]
    assert [number(v) for v in (0.4194, 0.0, 12.34, 1340.2, 8.4e-5, float("nan"))] == [
        "0.419", "0.000", "12.3", "1340", "8.4e-05", "–",
    ]  # fmt: skip


def test_pictures_that_fit_are_embedded_without_loss_and_others_shrink():
    flat = Image.new("RGB", (64, 64), (220, 40, 40))
    assert data_uri(flat, 10_000).startswith("data:image/")
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8))
    assert len(data_uri(noise, 40_000)) < 60_000


def test_plain_lines_come_at_intervals_and_tell_the_time_left():
    now = [0.0]
    stream = io.StringIO()
    with LiveLine(100, stream=stream, plain_interval_s=5.0, clock=lambda: now[0]) as live:
        for step in range(1, 101):
            now[0] += 2.0
            live.update(step, {"reward": step / 100} | ({"val": 0.5} if step == 10 else {}))
        live.note("done")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step   1/100  reward 0.010  2.0 s/step  eta 3m 18s"
    assert "val 0.500" in lines[10]  # shown again until there is a newer one
    assert lines[-2].startswith("step 100/100")
    assert lines[-1] == "done"
    assert len(lines) < 40


def test_a_resumed_run_does_not_count_old_steps_into_its_pace():
    now = [0.0]
    live = LiveLine(100, first_step=50, stream=io.StringIO(), clock=lambda: now[0])
    with live:
        now[0] = 10.0
        assert live.line(51) == "step  51/100  10.0 s/step  eta 8m 10s"


def test_the_bar_shows_the_same_line():
    stream = io.StringIO()
    with LiveLine(3, stream=stream, plain=False) as live:
        live.update(1, {"reward": 0.5})
        live.note("validated")
        live.update(3, {"reward": 0.75})
    assert "validated" in stream.getvalue()
    assert "reward 0.750" in stream.getvalue()


def test_durations():
    assert [duration(s) for s in (0.4, 59, 61, 3599, 7500, -3)] == ["0s", "59s", "1m 01s", "59m 59s", "2h 05m", "0s"]


def test_importing_the_report_needs_neither_torch_nor_ray():
    code = "import sys, run_report; assert not {'torch', 'ray', 'diffusers'} & set(sys.modules), 'heavy import'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
