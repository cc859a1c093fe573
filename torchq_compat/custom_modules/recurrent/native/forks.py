"""Threads after a fork: those of OpenMP stay in the parent, and a child would wait for them for ever."""

from __future__ import annotations

import os

import torch

__all__ = ["threads_of_loop"]

_state = {"used": False, "lost": False}


def threads_of_loop(wanted: int) -> int:
    """Return ``wanted`` threads, as far as torch may use them; one in a child of a process that used
    several."""
    threads = 1 if _state["lost"] else min(torch.get_num_threads(), max(1, wanted))
    if threads > 1:
        _state["used"] = True
    return threads


def _after_fork() -> None:
    _state["lost"] = _state["lost"] or _state["used"]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
