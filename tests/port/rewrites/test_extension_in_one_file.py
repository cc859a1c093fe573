"""A new rewrite or finding for manual review takes one file, and its texts one entry of the register."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchq_compat.port import reviews as manual_review
from torchq_compat.port import rewrites, scanner
from torchq_compat.port.constructs import CONSTRUCTS, Construct
from torchq_compat.port.finders import Finder
from torchq_compat.port.scanner import rewrite_text
from torchq_compat.port.source.parsed import ParsedSource
from torchq_compat.support.discovery import declared

REWRITE = """
import libcst as cst

from torchq_compat.port.constructs import Edit, Site
from torchq_compat.port.finders import Finder


def find(source):
    for name in source.nodes(cst.Name):
        if name.value == "prepare_old_fx":
            start = source.start(name)
            yield Site("TQ199", start, name.value, (Edit(start, source.end(name), "prepare_fx"),))


REWRITE = Finder("TQ199", find)
"""
MOVED_NAME = """
from torchq_compat.port.finders import Finder
from torchq_compat.port.names import Moved
from torchq_compat.port.source.imports import MovedNames

ROWS = (Moved("torch.ao.quantization.made_up", "torchq_compat.made_up", {"old_sum": "new_sum"}),)
REWRITE = Finder("TQ198", MovedNames("TQ198", ROWS).find, words=("old_sum", "made_up"))
"""
MOVED_USES = """\
from torch.ao.quantization import made_up as m
from torch.ao.quantization.made_up import old_sum

print(old_sum(1), m.old_sum(2))
"""
REVIEW = """
import libcst as cst

from torchq_compat.port.constructs import Site
from torchq_compat.port.finders import Finder


def find(source):
    for name in source.nodes(cst.Name):
        if name.value == "lost_in_fx":
            yield Site("TQ299", source.start(name), name.value, refusal="it is lost")


REVIEW = Finder("TQ299", find)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_rewrite_is_one_file(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package / "old_name.py").write_text(REWRITE)
    monkeypatch.setattr(rewrites, "__path__", [*rewrites.__path__, str(package)])
    (rewrite,) = set(declared(rewrites, Finder)) - set(rewrites.REWRITES)
    entry = Construct("TQ199", "an old name", "prepare_fx", "A made-up name.\n", "old-name")
    monkeypatch.setitem(CONSTRUCTS, rewrite.code, entry)
    assert rewrite_text("prepare_old_fx(m)\n", (rewrite,)) == "prepare_fx(m)\n"
    assert rewrite.construct.entry == '- <a id="tq199"></a>**TQ199 an old name.** A made-up name.\n'
    assert rewrite.construct.link == "migration/guide/findings.md#tq199"


def test_a_rewrite_of_a_name_of_a_module_that_no_table_has(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (package / "moved_name.py").write_text(MOVED_NAME)
    monkeypatch.setattr(rewrites, "__path__", [*rewrites.__path__, str(package)])
    (rewrite,) = set(declared(rewrites, Finder)) - set(rewrites.REWRITES)
    assert rewrite_text(MOVED_USES, (rewrite,)) == (
        "from torchq_compat import made_up as m\n"
        "from torchq_compat.made_up import new_sum\n\n"
        "print(new_sum(1), m.new_sum(2))\n"
    )
    monkeypatch.setattr(scanner, "REWRITES", (*rewrites.REWRITES, rewrite))
    assert not scanner.LEGACY_WORD.search(MOVED_USES.encode())
    assert any(re.search(rf"\b{word}\b", MOVED_USES) for word in scanner._words())


def test_a_finding_is_one_file(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package / "lost_name.py").write_text(REVIEW)
    monkeypatch.setattr(manual_review, "__path__", [*manual_review.__path__, str(package)])
    (review,) = set(declared(manual_review, Finder)) - set(manual_review.MANUAL_REVIEWS)
    (site,) = review.find(ParsedSource("lost_in_fx(m)\n"))
    assert (site.code, site.what, site.refusal) == ("TQ299", "lost_in_fx", "it is lost")


def test_every_code_is_declared_once() -> None:
    # One is of files, TQ214.
    assert len(CONSTRUCTS) == len(rewrites.REWRITES) + len(manual_review.MANUAL_REVIEWS) + 1
    orders = [rewrite.construct.order for rewrite in rewrites.REWRITES]
    assert orders == sorted(set(orders))
