"""All checks of the torch and torchao versions."""

from __future__ import annotations

import re

import torch
import torchao

from torchq_compat.support.user_warnings import warn_user

#: The tested pairs of versions; torchao imports private names of torch, so they work in pairs.
#: CONTRIBUTING.md says what of the suite each ran; the import warns about every other pair.
TESTED = (("2.13", "0.18"), ("2.14", "0.18"), ("2.15", "0.18"))


def untested_pair(torch_version: str, torchao_version: str) -> str:
    """Return the warning about a pair of versions that was not tested; empty for a tested pair."""
    pair = (_minor(torch_version), _minor(torchao_version))
    if pair in TESTED:
        return ""
    tested = ", ".join(f"torch {torch_minor} with torchao {ao_minor}" for torch_minor, ao_minor in TESTED)
    return (
        f"torch {torch_version} with torchao {torchao_version} is a pair that torchq_compat was not tested "
        f"with: it was with {tested}."
    )


def warn_of_untested_pair() -> None:
    """Warn, at the user's line, if the installed torch was not tested with the installed torchao."""
    sentence = untested_pair(torch.__version__, torchao.__version__)
    if sentence:
        warn_user("TQ804", sentence)


def _minor(version: str) -> str:
    found = re.match(r"\d+\.\d+", version)
    return found[0] if found else version
