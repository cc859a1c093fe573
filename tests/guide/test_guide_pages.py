"""The generated pages and blocks are as the command makes them, from the one list of known differences."""

from __future__ import annotations

from pathlib import Path

import pytest

import torchq_compat
from torchq_compat.migrate.guide.__main__ import main
from torchq_compat.migrate.guide.known_differences import (
    KnownDifference,
    changelog_list,
    guide_table,
    read_known_differences,
)
from torchq_compat.migrate.guide.pages import made_pages, with_block
from torchq_compat.migrate.scanning.constructs import CONSTRUCTS

ROOT = Path(torchq_compat.__file__).parents[1]
DIFFERENCES = read_known_differences(ROOT / "migration" / "known_differences.toml")


def test_the_committed_pages_are_the_made_ones() -> None:
    made = dict(made_pages(ROOT))
    assert {path.name for path in made} == {"README.md", "CHANGELOG.md", "support.md"}
    stale = [path.name for path, text in made.items() if path.read_text() != text]
    assert stale == [], "python -m torchq_compat.migrate.guide"


def test_every_construct_and_difference_is_in_its_pages() -> None:
    guide, changelog = (ROOT / name for name in ("migration/README.md", "CHANGELOG.md"))
    for construct in CONSTRUCTS.values():
        assert construct.guide in guide.read_text()
    for difference in DIFFERENCES:
        assert difference.here in guide.read_text()
        assert difference.here in changelog.read_text()


def test_a_difference_names_a_test_that_is_there() -> None:
    assert len(DIFFERENCES) >= 39
    assert [row.test for row in DIFFERENCES if not (ROOT / "tests" / row.test).exists()] == []
    assert len({row.fx for row in DIFFERENCES}) == len(DIFFERENCES)


def test_a_row() -> None:
    rows = (KnownDifference("a", "b", "t.py"), KnownDifference("c", "d", "u.py", "there"))
    _, _, plain, linked = guide_table(rows).splitlines()
    assert plain == "| a | b | `t.py` |"
    assert linked == '| <a id="there"></a>c | d | `u.py` |'
    assert changelog_list(rows) == "- FX: a. Here: b.\n- FX: c. Here: d.\n"


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
    pages = ("CHANGELOG.md", "migration/README.md", "migration/support.md")
    for name in (*pages, "migration/known_differences.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "migration/support.md").write_text("stale\n")
    monkeypatch.setattr("sys.argv", ["guide", "--check", str(tmp_path)])
    assert main() == 1
    assert "support.md is not as it would be made" in capsys.readouterr().err
    assert (tmp_path / "migration/support.md").read_text() == "stale\n"
    monkeypatch.setattr("sys.argv", ["guide", str(tmp_path)])
    assert main() == 0
    assert all((tmp_path / name).read_text() == (ROOT / name).read_text() for name in pages)
