"""The generated pages and blocks are up to date, and come from the one list of known differences."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

import torchq_compat
from migration.generate.__main__ import main
from migration.generate.known_differences import guide_list
from migration.generate.pages import guide_pages, made_pages, with_block
from migration.generate.pictures import pictures
from migration.generate.results_table import results_table
from torchq_compat.codes import DIFFERENCES as REGISTERED
from torchq_compat.codes import KnownDifference
from torchq_compat.port.constructs import CONSTRUCTS

ROOT = Path(torchq_compat.__file__).parents[1]
DIFFERENCES = tuple(REGISTERED.values())
#: What pages are made from.
FROM_DATA = ("known_differences.toml", "benchmarks.json", "quantizers.json", "zoo.json")


def test_the_committed_pages_are_the_made_ones() -> None:
    made = dict(made_pages(ROOT))
    named = {path.relative_to(ROOT).as_posix() for path in made}
    assert named >= {"README.md", "migration/support.md", "migration/pictures/cell.svg"}
    stale = [path.name for path, text in made.items() if path.read_text() != text]
    assert stale == [], "python -m migration.generate"


def test_the_contents_name_every_page() -> None:
    folder = ROOT / "migration"
    assert {*guide_pages(ROOT)} == {folder / "README.md", *(folder / "guide").glob("*.md")}
    assert len(guide_pages(ROOT)) > 10
    site = yaml.safe_load((ROOT / ".ci" / "mkdocs.yml").read_text())
    (guide,) = (entry["Guide"] for entry in site["nav"] if "Guide" in entry)
    assert [folder / name for name in guide] == guide_pages(ROOT), "the order of the site's menu"
    others = {name for entry in site["nav"] for name in entry.values() if isinstance(name, str)}
    others.remove("api/index.html")  # api_reference.py makes it
    assert {folder / name for name in others} | {folder / "README.md"} == {*folder.glob("*.md")}


def test_every_construct_and_difference_is_in_its_pages() -> None:
    guide = "".join(page.read_text() for page in guide_pages(ROOT))
    for construct in CONSTRUCTS.values():
        assert construct.entry in guide
    for difference in DIFFERENCES:
        assert difference.here in guide


def test_a_difference_names_a_test_that_is_there() -> None:
    assert len(DIFFERENCES) >= 39
    assert [row.test for row in DIFFERENCES if not (ROOT / "tests" / row.test).exists()] == []
    assert len({row.fx for row in DIFFERENCES}) == len(DIFFERENCES)


def test_a_row() -> None:
    rows = (KnownDifference("TQ1", "a", "b", "t.py"), KnownDifference("TQ2", "c", "d", "u.py", "there"))
    plain, linked = guide_list(rows).splitlines()
    assert plain == "- **TQ1** a → b."
    assert linked == '- <a id="there"></a>**TQ2** c → d.'


def test_a_block_is_replaced_and_the_rest_kept() -> None:
    text = "x\n<!-- begin: rows. Made. -->\n\nold\n\n<!-- end: rows -->\ny\n"
    assert with_block(text, "rows", "new\n") == text.replace("old", "new")
    for broken in ("", text.replace("end", "End"), text + text):
        with pytest.raises(ValueError, match="blocks are named 'rows'"):
            with_block(broken, "rows", "new\n")


def test_the_command_finds_and_writes_what_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "migration").mkdir()
    pages = [path.relative_to(ROOT).as_posix() for path, _ in made_pages(ROOT)]
    others = [path.relative_to(ROOT).as_posix() for path in guide_pages(ROOT)]
    data = (f"migration/{name}" for name in FROM_DATA)
    for name in {*pages, *others, *data}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "migration/support.md").write_text("stale\n")
    monkeypatch.setattr("sys.argv", ["guide", "--check", str(tmp_path)])
    assert main() == 1
    assert "support.md is not as it would be made" in capsys.readouterr().err
    assert (tmp_path / "migration/support.md").read_text() == "stale\n"
    monkeypatch.setattr("sys.argv", ["guide", str(tmp_path)])
    assert main() == 0
    assert all((tmp_path / name).read_text() == (ROOT / name).read_text() for name in pages)


def test_a_page_of_contents_gives_the_order(tmp_path: Path) -> None:
    folder = tmp_path / "migration"
    folder.mkdir()
    (folder / "README.md").write_text("[b](guide/b.md) [a](guide/a.md#x) [b](guide/b.md#y) [c](other.md)")
    assert [path.name for path in guide_pages(tmp_path)] == ["README.md", "b.md", "a.md"]


@pytest.mark.parametrize("name", pictures())
def test_a_picture_is_whole_and_reads_in_both_modes(name: str) -> None:
    picture = ElementTree.fromstring(pictures()[name])
    width, height = int(picture.attrib["width"]), int(picture.attrib["height"])
    boxes = list(picture.iter("{http://www.w3.org/2000/svg}rect"))
    assert len(boxes) > 5
    for box in boxes:
        left, top = float(box.attrib["x"]), float(box.attrib["y"])
        assert 0 <= left <= width - float(box.attrib["width"])
        assert 0 <= top <= height - float(box.attrib["height"])
    assert "prefers-color-scheme: dark" in pictures()[name]
    assert "href" not in pictures()[name]


def test_the_cell_has_every_part_of_an_lstm() -> None:
    drawn = pictures()["cell.svg"]
    for part in parts_of_lstm():
        assert f">{part}<" in drawn


def parts_of_lstm() -> list[str]:
    return [
        *("igates", "hgates", "gates", "input_gate", "forget_gate", "cell_gate", "output_gate"),
        *("fgate_cx", "igate_cgate", "fgate_cx_igate_cgate", "tanh_cy", "ogate_cy"),
    ]


def test_results_are_the_measured_numbers(tmp_path: Path) -> None:
    def row(contender: str, size: int, sqnr: float | None, ms: float) -> dict[str, object]:
        return {"case": case, "contender": contender, "size_bytes": size, "sqnr_db": sqnr, "median_ms": ms}

    case = "(256, 512, 2, 1, 1)"
    rows = [
        row("float", 400, None, 2.0),
        row("ours, lowered", 100, 30.0, 1.0),
        row("FX static", 110, 31.0, 0.5),
    ]
    data = {
        "environment": {"versions": {"torch": "9"}, "cores": 2, "architecture": "a", "torch_capability": "b"},
        "feedforward": rows,
        "recurrent": [],
    }
    (tmp_path / "b.json").write_text(json.dumps(data))
    table = results_table(tmp_path / "b.json")
    assert "| one step of it | 30.0 / 31.0 / - | 0.25 / 0.28 / - | 0.50 / 0.25 / - |" in table
    assert "CNN" not in table, "it was not measured"
