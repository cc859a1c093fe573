"""Three checks for the tests of a rewrite. They dedent the given code."""

from __future__ import annotations

from textwrap import dedent

from torchq_compat.port.finders import Finder
from torchq_compat.port.scanner import Parse, rewrite_text
from torchq_compat.port.source.parsed import ParsedSource

IMPORTS = """\
import torch
from torch import nn
from torchq_compat.quantize_fx import convert_fx, fuse_fx, prepare_fx, prepare_qat_fx
"""


def check_noop(rewrite: Finder, code: str) -> None:
    """Assert that there is nothing to rewrite and nothing to report."""
    code = dedent(code)
    assert rewrite_text(code, (rewrite,)) == code
    assert list(rewrite.find(ParsedSource(code))) == []


def check_transformed(rewrite: Finder, before: str, after: str, parse: Parse = ParsedSource) -> None:
    """Assert that ``before`` becomes ``after``, which needs no further rewrite."""
    before, after = dedent(before), dedent(after)
    assert rewrite_text(before, (rewrite,), parse) == after
    assert rewrite_text(after, (rewrite,), parse) == after


def check_left(rewrite: Finder, code: str, reason: str) -> None:
    """Assert that there is one site, which is left unchanged for ``reason``."""
    code = dedent(code)
    assert rewrite_text(code, (rewrite,)) == code
    (site,) = rewrite.find(ParsedSource(code))
    assert reason in site.refusal
    assert site.code == rewrite.code
