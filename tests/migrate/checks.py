"""Three verbs for the tests of a rewrite. Code is given dedented."""

from __future__ import annotations

from textwrap import dedent

from torchq_compat.migrate.rewrites.declaration import Rewrite
from torchq_compat.migrate.scanning.rewriter import Origin, rewrite_text
from torchq_compat.migrate.source.parsed_source import ParsedSource

IMPORTS = """\
import torch
from torch import nn
from torchq_compat.quantize_fx import convert_fx, fuse_fx, prepare_fx, prepare_qat_fx
"""


def check_noop(rewrite: Rewrite, code: str) -> None:
    """Nothing to do and nothing to say."""
    code = dedent(code)
    assert rewrite_text(code, (rewrite,)) == code
    assert list(rewrite.find(ParsedSource(code))) == []


def check_transformed(rewrite: Rewrite, before: str, after: str, origin: Origin | None = None) -> None:
    """``before`` becomes ``after``, which has nothing left to do."""
    before, after = dedent(before), dedent(after)
    assert rewrite_text(before, (rewrite,), origin) == after
    assert rewrite_text(after, (rewrite,), origin) == after


def check_left(rewrite: Rewrite, code: str, reason: str) -> None:
    """One site, left as it is for ``reason``."""
    code = dedent(code)
    assert rewrite_text(code, (rewrite,)) == code
    (site,) = rewrite.find(ParsedSource(code))
    assert reason in site.refusal
    assert site.code == rewrite.code
