"""The HTML page of compare: self-contained, written atomically, and rendered correctly by a browser.

The browser test opens it in headless Chromium: ``pytest -m browser``, which ``.ci/run`` does.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.oracle import MAP_LSTM
from torchq_compat.comparison import pictures
from torchq_compat.comparison.page import Comparison, page, page_table, write_page
from torchq_compat.comparison.results import Capture, ComparedModel, Finding, FxOutcome, Kind, Point
from torchq_compat.comparison.text import as_text, grade, noise_text, summary_sentence, worst_places
from torchq_compat.errors import ScriptError

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
#: Headless, without anything that connects to the network by itself.
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=10000",
    "--window-size=1280,6000",
)
#: Added to a copy of the page: writes what the browser rendered as text into the DOM.
PROBE = """
<script>
const errors = [];
window.addEventListener("error", event => errors.push(String(event.message)), true);
window.addEventListener("load", () => {
  const images = [...document.querySelectorAll("figure svg")].map(i => [i.clientWidth, i.clientHeight]);
  const probe = document.createElement("pre");
  probe.id = "probe";
  probe.textContent = JSON.stringify({
    errors, images, width: document.documentElement.scrollWidth,
    verdicts: [...document.querySelectorAll("[data-verdict]")].map(v => v.innerText),
    requests: performance.getEntriesByType("resource").map(r => r.name).filter(n => !n.startsWith("data:")),
  });
  document.body.append(probe);
});
</script>
"""


class Tagger(nn.Module):
    """A model whose names contain markup, which must not get into the page."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, bidirectional=True), nn.Linear(32, 4)
        with torch.no_grad():
            for name, parameter in self.lstm.named_parameters():
                parameter.mul_(4.0 if name.endswith("_reverse") else 0.3)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        output, (h, c) = self.lstm(x, (h, c))
        return self.head(output), h


Tagger.__name__ = "Tagger<script>"


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    torch.manual_seed(0)
    state = torch.zeros(2, 4, 16)
    batches = [(torch.randn(20, 4, 8), state, state.clone()) for _ in range(2)]
    mapping = get_default_qconfig_mapping("x86")
    found = tc.compare(Tagger().eval(), mapping, batches[0], batches, prepare_custom_config=MAP_LSTM)
    # All parts of one cell, and some of the other's, and pictures of few: drawing is what takes time here.
    capture = found.capture
    parts = [point for point in capture.points if point.kind is Kind.PART]
    forward, backward = ([p for p in parts if cell in p.name] for cell in ("layer_fw", "layer_bw"))
    points = tuple(
        replace(point, histogram=None) if point in forward[4:] else point
        for point in capture.points
        if point not in backward[3:]
    )
    return replace(found, capture=replace(capture, points=points))


@pytest.fixture(scope="module")
def text(comparison: Comparison) -> str:
    return page((comparison,))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave pictures of values empty, for tests of what stands around them: each takes 0.3 s."""
    monkeypatch.setattr(pictures, "histogram", lambda alike: "<svg></svg>")


class Collector(HTMLParser):
    """Return every tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_is_whole_by_itself(text: str) -> None:
    tags = Collector(text).tags
    assert {tag for tag, _ in tags}.isdisjoint({"script", "link", "iframe", "object", "embed", "img"})
    for _, attributes in tags:
        for name in {"src", "href", "xlink:href", "srcset", "data", "action"} & attributes.keys():
            assert (attributes[name] or "").startswith("#")
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    assert "@import" not in text
    assert text.count("<svg ") == text.count("</svg>") > 10
    # Ids are unique to a picture: the clip path of another picture would cut it.
    ids = [attributes["id"] for tag, attributes in tags if tag == "clippath" and attributes.get("id")]
    assert len(set(ids)) == len(ids) > 10


def test_what_is_drawn(comparison: Comparison, text: str) -> None:
    drawn = [attributes["aria-label"] for tag, attributes in Collector(text).tags if tag == "figure"]
    cells = [cell.path for cell in comparison.capture.cells]
    headings = list(dict.fromkeys((label or "").rpartition(": ")[0] or label for label in drawn))
    assert drawn[:2] == ["SQNR and dtype of every place", "Float against quantized: output 0 over time"]
    assert not any("dimension" in (label or "") for label in drawn), "a batch has no time"
    for path in ("outputs, modules and ops", *cells):
        assert f"Values against the qparams: {path}" in headings
    assert [label for label in drawn if (label or "").startswith("Cell ")] == [f"Cell {p}" for p in cells]
    assert "currentColor" in text
    assert "prefers-color-scheme: dark" in text


def test_tables_and_findings(comparison: Comparison, text: str) -> None:
    assert "<td>-</td>" not in text
    text = html.unescape(text)
    assert '<div class="verdict better" data-verdict="better">' in text
    assert comparison.verdict.headline in text
    assert summary_sentence(comparison) in text
    for point in (*comparison.capture.outputs, *comparison.capture.points):
        assert point.name in text
    for finding in comparison.verdict.findings:
        assert f"<dt>{finding.where}</dt>" in text
        assert finding.why in text
        assert finding.link in text
    for label in ("versions", "date", "processor", "command"):
        assert f"<dt>{label}</dt>" in text


def without_parts(capture: Capture) -> Capture:
    """Return ``capture`` with few pictures to draw: outputs, modules and ops."""
    points = tuple(point for point in capture.points if point.kind is not Kind.PART)
    return replace(capture, points=points, cells=(), series=())


@pytest.mark.usefixtures("undrawn")
def test_a_reason_is_told_once(comparison: Comparison) -> None:
    findings = [Finding(f"place{index}", f"what{index}", "the reason", "the#link") for index in range(9)]
    findings.insert(1, Finding("apart", "else", "another reason", ""))
    verdict = replace(comparison.verdict, findings=tuple(findings))
    of_many = ComparedModel(without_parts(comparison.capture), verdict)
    shown = page((of_many,))
    assert shown.count("the reason") == shown.count("another reason") == 1
    assert [f"<dt>{finding.where}</dt>" in shown for finding in findings] == [True] * 10
    printed = as_text((of_many,)).partition("What differs, and why\n")[2].splitlines()
    assert printed == [
        *[f"  place{index}: what{index}" for index in range(6)],
        "  and 3 more places; --html and --json have them",
        "    the reason",
        "    the#link",
        "  apart: else",
        "    another reason",
    ]


@pytest.mark.usefixtures("undrawn")
def test_of_many_places_the_noisiest_are_drawn_apart(comparison: Comparison) -> None:
    point = next(each for each in comparison.capture.points if each.histogram and each.ours.qparams)
    assert point.histogram is not None
    low = point.histogram.low
    points = tuple(
        replace(
            point,
            name=f"layer.{index}",
            kind=Kind.OP,
            ours=replace(
                point.ours, sqnr=50.0 - index % 50, qparams=point.ours.qparams if index % 3 else None
            ),
            histogram=replace(point.histogram, low=low - index),
        )
        for index in range(150)
    )
    capture = replace(without_parts(comparison.capture), points=points)
    shown = page((replace(comparison, capture=capture),))
    drawn = [attributes["aria-label"] or "" for tag, attributes in Collector(shown).tags if tag == "figure"]
    assert drawn[0] == "SQNR and dtype of every place"
    assert "uint8 (100)" in shown
    assert "float (50)" in shown
    # 8 of each 50 have the least dB, and are drawn in the order of computation.
    noisiest = [50 * turn + index for turn in range(3) for index in range(42, 50)]
    assert [int(label.rpartition(".")[2]) for label in drawn if "layer." in label] == noisiest
    assert shown.count('<div class="bar"') == 60
    assert all(f"layer.{index}<" in shown for index in range(150)), "the table has all"


def test_what_fx_has_the_same_is_told_once(comparison: Comparison) -> None:
    point = next(each for each in comparison.capture.points if each.fx and each.ours.qparams)
    assert point.fx is not None
    assert point.ours.qparams is not None
    narrow = replace(point.ours.qparams, quant_max=point.ours.qparams.quant_max // 2)
    fx = replace(point.fx, qparams=point.ours.qparams)
    ((_, told),) = page_table([replace(point, ours=replace(point.ours, qparams=narrow), fx=fx)])
    assert told["FX dtype"] != told["dtype"]
    assert {"scale", "zero point"} <= told.keys()
    assert {"FX scale", "FX zero point"}.isdisjoint(told)


def test_the_sentence_says_the_numbers(comparison: Comparison) -> None:
    costs = comparison.capture.costs
    lowest = min(output.ours.sqnr for output in comparison.capture.outputs)
    ours, _, theirs = summary_sentence(comparison).partition(". FX: ")
    assert ours.startswith(f"int8 within {noise_text(lowest)} of float; ")
    assert f"{costs.our_bytes / costs.float_bytes:.2f} of the size; " in ours
    assert re.search(r"\d\.\d times as (fast|slow)$", ours)
    assert theirs.startswith("within ")
    refused = replace(comparison.capture.fx, outcome=FxOutcome.RAISED, error="ValueError: no\nmore")
    without = replace(comparison, capture=replace(comparison.capture, fx=refused))
    assert summary_sentence(without).endswith("FX cannot run this model because of ValueError: no.")


@pytest.mark.parametrize(
    ("sqnr", "word", "noise"),
    [
        (float("inf"), "exact", "0%"),
        (40.0, "good", "1.0%"),
        (30.0, "good", "3.2%"),
        (20.0, "fair", "10%"),
        (19.9, "poor", "10%"),
        (0.0, "poor", "100%"),
        (60.0, "good", "0.10%"),
    ],
)
def test_grades(sqnr: float, word: str, noise: str) -> None:
    assert (grade(sqnr), noise_text(sqnr)) == (word, noise)


def test_the_worst_places_are_marked_and_explained(comparison: Comparison, text: str) -> None:
    worst = worst_places(comparison.capture)
    assert len(worst) == 3
    told = [place.point.ours.sqnr for place, _ in worst]
    assert told == sorted(told)
    assert told[0] == min(point.ours.sqnr for point in comparison.capture.points)
    assert all(len(why) > 20 for _, why in worst)
    assert text.count("▲") == 3


def test_longer_is_worse(text: str) -> None:
    bar = re.compile(r'<div class="bar"><i style="width:(.*?)%"></i><span class="(.*?)">(.*?) dB</span>')
    drawn = [(float(width), word, float(sqnr)) for width, word, sqnr in bar.findall(text)]
    by_noise = sorted(drawn)
    assert by_noise[0][0] < by_noise[-1][0]
    assert by_noise[-1][1] != "good"
    assert by_noise[-1][2] == min(sqnr for _, _, sqnr in drawn)


@pytest.mark.usefixtures("undrawn")
def test_without_fx_nothing_speaks_of_its_columns(comparison: Comparison) -> None:
    def alone(points: tuple[Point, ...]) -> tuple[Point, ...]:
        return tuple(replace(point, fx=None, steps=None) for point in points)

    capture = without_parts(comparison.capture)
    fx = replace(capture.fx, outcome=FxOutcome.NOT_ASKED)
    capture = replace(capture, outputs=alone(capture.outputs), points=alone(capture.points), fx=fx)
    shown = page((ComparedModel(capture, comparison.verdict),))
    head = "".join(re.findall(r"<th.*?</th>", shown))
    assert "FX" not in head
    assert "differ" not in head
    assert 'class="key' not in shown
    assert "zero point" in head


def test_names_are_escaped(text: str) -> None:
    assert "Tagger<script>" not in text
    assert "Tagger&lt;script&gt;" in text


@pytest.mark.slow
def test_a_page_is_replaced_whole_or_left(
    comparison: Comparison, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also, the same comparison gives the same page."""
    path = tmp_path / "report.html"
    path.write_text("old")
    comparison.write_html(path)
    assert path.read_text(encoding="utf-8") == text
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(ScriptError, match="No space left on device"):
        write_page((comparison,), path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.html"]


def test_a_cell_drawing_has_every_part_once(comparison: Comparison) -> None:
    (axes,) = pictures.draw_cell(
        comparison.capture.cells[0], {p.name: p for p in comparison.capture.points}
    ).axes
    texts = [text.get_text() for text in axes.texts]
    parts = [p for p in comparison.capture.points if p.kind is Kind.PART and "layer_fw" in p.name]
    for part in parts:
        assert texts.count(part.name.rpartition(".")[2]) == 1
        qparams = part.ours.qparams
        assert qparams is not None
        assert f"q→dq {qparams.dtype} s={qparams.scales[0]:.3g} z={qparams.zero_points[0]}" in texts
    assert len(parts) == 12
    assert {"x", "hx", "cx"} <= set(texts)


@pytest.mark.browser
def test_in_a_browser(comparison: Comparison, text: str, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(text.replace("</head>", f"{PROBE}</head>"), encoding="utf-8")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert browser, "no Chromium: install it (Debian: apt-get install chromium), or run .ci/run, which does"
    dom = _browse(browser, tmp_path, "--dump-dom")
    assert "CONSOLE" not in dom.stderr
    probe = re.search(r'<pre id="probe">(.*?)</pre>', dom.stdout, re.DOTALL)
    assert probe
    seen = json.loads(html.unescape(probe[1]))
    assert seen["errors"] == []
    assert seen["requests"] == []
    assert [verdict.split()[0] for verdict in seen["verdicts"]] == ["Better"]
    assert comparison.verdict.headline in seen["verdicts"][0]
    assert len(seen["images"]) == text.count("<svg ")
    assert all(min(sizes) > 100 for sizes in seen["images"])
    assert seen["width"] <= 1280
    _browse(browser, tmp_path, f"--screenshot={tmp_path / 'page.png'}")
    pixels = matplotlib.image.imread(tmp_path / "page.png")
    assert pixels.shape[:2] == (6000, 1280)
    # The verdict's green, the blue of our bars and the orange of FX's are all visible.
    for colour in ((0x2E, 0x7D, 0x32), (0x1F, 0x77, 0xB4), (0xD9, 0x5F, 0x02)):
        distance = abs(pixels[..., :3] * 255 - torch.tensor(colour).numpy()).max(-1)
        assert (distance < 3).sum() > 500


def _browse(browser: str, folder: Path, what: str) -> subprocess.CompletedProcess[str]:
    profile = folder / f"profile{len(os.listdir(folder))}"
    profile.mkdir()
    return subprocess.run(
        [browser, *OPTIONS, f"--user-data-dir={profile}", what, (folder / "report.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
