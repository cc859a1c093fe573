"""Histograms that are searched faster: coarser ones where ranges are not the point, and those of FX."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.ao.quantization import HistogramObserver, QConfig, QConfigMapping, get_default_qconfig_mapping

__all__ = ["coarse_qconfig_mapping", "searched_in_arrays"]


def coarse_qconfig_mapping(backend: str) -> QConfigMapping:
    """Return the default mapping of ``backend`` with histograms of 64 bins in place of 2048: the search for
    their best ranges is a large part of a conversion."""
    mapping = get_default_qconfig_mapping(backend)
    mapping.set_global(_coarse(mapping.global_qconfig))
    for kind, qconfig in mapping.object_type_qconfigs.items():
        mapping.set_object_type(kind, _coarse(qconfig))
    return mapping


def _coarse(qconfig: QConfig) -> QConfig:
    return QConfig(_coarse_observer(qconfig.activation), qconfig.weight)


@functools.cache  # Equal observers stay the same object.
def _coarse_observer(observer: Any) -> Any:
    return observer.with_args(bins=64) if isinstance(observer(), HistogramObserver) else observer


@contextmanager
def searched_in_arrays() -> Iterator[None]:
    """Let torch.ao search its histograms in arrays. It compares single numbers up to 100,000 times, which
    takes half a second with tensors; an array holds the same float32 numbers."""
    # Before numpy 2 a float32 was compared as a float64.
    if np.float32(0.1) == 0.1:
        with patch.object(torch, "cumsum", lambda values, dim: values.cumsum(dim).numpy()):
            yield
    else:
        yield
