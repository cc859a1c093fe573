"""A rewrite, or a finding for manual review, is one new file: found, run, listed and in the guide."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchq_compat.migrate import manual_review, rewrites
from torchq_compat.migrate.manual_review.review import ManualReview
from torchq_compat.migrate.rewrites.declaration import Rewrite
from torchq_compat.migrate.scanning.constructs import CONSTRUCTS
from torchq_compat.migrate.scanning.rewriter import rewrite_text
from torchq_compat.migrate.source.parsed_source import ParsedSource
from torchq_compat.support.discovery import declared

REWRITE = """
import libcst as cst

from torchq_compat.migrate.legacy_api.construct import Construct
from torchq_compat.migrate.rewrites.declaration import Rewrite
from torchq_compat.migrate.source.sites import Site
from torchq_compat.migrate.source.text_edits import Edit


def find(source):
    for name in source.nodes(cst.Name):
        if name.value == "prepare_old_fx":
            start = source.start(name)
            yield Site("TQ199", start, name.value, (Edit(start, source.end(name), "prepare_fx"),))


REWRITE = Rewrite(
    name="old-name",
    construct=Construct("TQ199", "an old name", "prepare_fx", "A made-up name.\\n"),
    summary="prepare_old_fx becomes prepare_fx",
    find=find,
)
"""
REVIEW = """
import libcst as cst

from torchq_compat.migrate.legacy_api.construct import Construct
from torchq_compat.migrate.manual_review.review import ManualReview
from torchq_compat.migrate.source.sites import Site


def find(source):
    for name in source.nodes(cst.Name):
        if name.value == "lost_in_fx":
            yield Site("TQ299", source.start(name), name.value, refusal="it is lost")


REVIEW = ManualReview(Construct("TQ299", "a lost name", "nothing", "A made-up name.\\n"), find)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_rewrite_is_one_file(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package / "old_name.py").write_text(REWRITE)
    monkeypatch.setattr(rewrites, "__path__", [*rewrites.__path__, str(package)])
    (rewrite,) = set(declared(rewrites, Rewrite)) - set(rewrites.REWRITES)
    assert rewrite.name == "old-name"
    assert rewrite.code == "TQ199"
    assert rewrite_text("prepare_old_fx(m)\n", (rewrite,)) == "prepare_fx(m)\n"
    assert rewrite.construct.section == "### TQ199 an old name\n\nA made-up name.\n"
    assert rewrite.construct.link.endswith("#tq199-an-old-name")


def test_a_finding_is_one_file(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package / "lost_name.py").write_text(REVIEW)
    monkeypatch.setattr(manual_review, "__path__", [*manual_review.__path__, str(package)])
    (review,) = set(declared(manual_review, ManualReview)) - set(manual_review.MANUAL_REVIEWS)
    (site,) = review.find(ParsedSource("lost_in_fx(m)\n"))
    assert (site.code, site.what, site.refusal) == ("TQ299", "lost_in_fx", "it is lost")


def test_every_code_is_declared_once() -> None:
    assert len(CONSTRUCTS) == len(rewrites.REWRITES) + len(manual_review.MANUAL_REVIEWS)
    orders = [rewrite.order for rewrite in rewrites.REWRITES]
    assert orders == sorted(set(orders))
