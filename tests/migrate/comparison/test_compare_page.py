"""The HTML page of compare: whole by itself, written in one step, and, in a browser, as it should be.

The browser test opens it in headless Chromium: ``pytest -m browser``, which ``.ci/run`` does.
"""

from __future__ import annotations

import base64
import html
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.oracle import MAP_LSTM
from torchq_compat.errors import ReportError
from torchq_compat.migrate.comparison.printable import Comparison
from torchq_compat.migrate.comparison.report.html_report import page, write_page
from torchq_compat.migrate.comparison.results import Kind

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
#: Headless, with nothing that would reach out by itself.
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
#: Added to a copy of the page: what the browser made of it, as text it leaves in the DOM.
PROBE = """
<script>
const errors = [];
window.addEventListener("error", event => errors.push(String(event.message)), true);
window.addEventListener("load", () => {
  const images = [...document.images].map(i => [i.naturalWidth, i.naturalHeight, i.clientWidth]);
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
    """With markup where a name could carry it into the page."""

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
    return tc.compare(Tagger().eval(), mapping, batches[0], batches, prepare_custom_config=MAP_LSTM)


@pytest.fixture(scope="module")
def text(comparison: Comparison) -> str:
    return page((comparison,))


class Collector(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_is_whole_by_itself(text: str) -> None:
    tags = Collector(text).tags
    assert {tag for tag, _ in tags}.isdisjoint({"script", "link", "iframe", "object", "embed"})
    images = [attributes for tag, attributes in tags if tag == "img"]
    for _, attributes in tags:
        for name in {"src", "href", "srcset", "style", "data", "action"} & attributes.keys():
            assert (attributes[name] or "").startswith(("data:image/svg+xml;base64,", "#"))
    assert re.search(r"url\(|@import", text) is None
    # An SVG loaded as an image may not load anything either.
    for image in images:
        svg = base64.b64decode((image["src"] or "").partition(",")[2]).decode()
        assert set(re.findall(r'xlink:href="([^#"]*)', svg)) <= {""}
        assert svg.rstrip().endswith("</svg>")


def test_what_is_drawn(comparison: Comparison, text: str) -> None:
    headings = [attributes["alt"] for tag, attributes in Collector(text).tags if tag == "img"]
    cells = [cell.path for cell in comparison.capture.cells]
    assert headings == [
        "Error per layer",
        "Float against quantized: output 0 over time",
        "Float against quantized: output 1 over dimension 2",
        "Values against the qparams: outputs, modules and ops",
        *(f"Values against the qparams: {path}" for path in cells),
        *(f"Cell {path}" for path in cells),
    ]


def test_tables_and_findings(comparison: Comparison, text: str) -> None:
    text = html.unescape(text)
    assert '<div class="verdict better" data-verdict="better">' in text
    assert comparison.verdict.headline in text
    for point in (*comparison.capture.outputs, *comparison.capture.points):
        assert f"<td>{point.name}</td>" in text
    for finding in comparison.verdict.findings:
        assert f"<dt>{finding.where}</dt>" in text
        assert finding.why in text
        assert finding.link in text


def test_names_are_escaped(text: str) -> None:
    assert "Tagger<script>" not in text
    assert "Tagger&lt;script&gt;" in text


def test_a_page_is_replaced_whole_or_left(
    comparison: Comparison, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the same comparison gives the same page."""
    path = tmp_path / "report.html"
    path.write_text("old")
    comparison.write_html(path)
    assert path.read_text(encoding="utf-8") == text
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(ReportError, match="No space left on device"):
        write_page((comparison,), path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.html"]


def test_a_cell_drawing_has_every_part_once(comparison: Comparison) -> None:
    from torchq_compat.migrate.comparison.report.cell_drawing import draw_cell

    (axes,) = draw_cell(comparison.capture.cells[0], {p.name: p for p in comparison.capture.points}).axes
    texts = [text.get_text() for text in axes.texts]
    parts = [p for p in comparison.capture.points if p.kind is Kind.PART and "layer_fw" in p.name]
    for part in parts:
        assert texts.count(part.name.rpartition(".")[2]) == 1
        qparams = part.ours.qparams
        assert qparams is not None
        assert f"q→dq {qparams.dtype} {qparams.scales[0]:.3g}/{qparams.zero_points[0]}" in texts
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
    assert len(seen["images"]) == text.count("<img ")
    assert all(min(sizes) > 300 for sizes in seen["images"] if sizes[1] > 300)
    assert all(min(sizes) > 100 for sizes in seen["images"])
    assert seen["width"] <= 1280
    _browse(browser, tmp_path, f"--screenshot={tmp_path / 'page.png'}")
    pixels = matplotlib.image.imread(tmp_path / "page.png")
    assert pixels.shape[:2] == (6000, 1280)
    # The verdict's green, the blue of our bars and the orange of FX's are there to be seen.
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
