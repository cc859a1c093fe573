"""Texts that tests of the rewrites parse again and again are parsed once.

A folder imports the fixture ``parsed_once`` in its ``conftest.py``. A syntax tree and its metadata are never
changed; names are resolved anew for each ``ParsedSource``.
"""

from __future__ import annotations

import functools

import libcst
import pytest
from libcst.metadata import MetadataWrapper

from tests.helpers.once import SHARED
from torchq_compat.port.source import parsed as parsed_source

__all__ = ["parsed_once"]

REMEMBERED = 40
_parse_module = functools.lru_cache(REMEMBERED)(libcst.parse_module)


@functools.lru_cache(REMEMBERED)
def _metadata_of(module: libcst.Module) -> MetadataWrapper:
    return MetadataWrapper(module, unsafe_skip_copy=True)


def _wrapper(module: libcst.Module, *, unsafe_skip_copy: bool) -> MetadataWrapper:
    assert unsafe_skip_copy
    return _metadata_of(module)


@pytest.fixture(autouse=True)
def parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    if SHARED:
        monkeypatch.setattr(libcst, "parse_module", _parse_module)
        monkeypatch.setattr(parsed_source, "MetadataWrapper", _wrapper)
