"""Convolutions on which oneDNN's kernels never return: recognized by shape, since a trial would hang as well.

Found on one x86 CPU with torch 2.13, by running the packed op that FX calls: depthwise, 16 channels,
stride 1 and a window of 14 or more along the last dimension, in cases with 29 results or more. oneDNN may
block fewer channels at a time on other CPUs, so fewer channels and every length are included here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["may_never_return"]

MOST_CHANNELS = 16
LEAST_WINDOW = 14


def may_never_return(weight: Sequence[int], settings: tuple[Any, ...]) -> bool:
    """Return whether oneDNN may hang on a convolution.

    Args:
        weight: the shape of its weight, (output channels, input channels per group, \\*window).
        settings: the settings it is packed with: stride, padding, dilation, groups.
    """
    if len(weight) < 3:
        return False
    stride, groups = settings[0], settings[-1]
    is_depthwise = weight[1] == 1 and 1 < groups <= MOST_CHANNELS
    return is_depthwise and weight[-1] >= LEAST_WINDOW and stride[-1] == 1
