"""All checks of the torch and torchao versions."""

import re

import torch
import torchao

from torchq_compat.support.user_warnings import warn_user

#: The tested pairs of versions; torchao imports private names of torch, so they work in pairs.
#: CONTRIBUTING.md says what of the suite each ran; the import warns about every other pair.
TESTED = (("2.13", "0.18"), ("2.14", "0.18"), ("2.15", "0.18"))


def is_tested(torch_version: str, torchao_version: str) -> bool:
    """Return whether the tests have run with these versions."""
    return (_minor(torch_version), _minor(torchao_version)) in TESTED


def warn_of_untested_pair() -> None:
    """Warn, at the user's line, if the installed torch was not tested with the installed torchao."""
    pair = torch.__version__, torchao.__version__
    if not is_tested(*pair):
        tested = (f"torch {torch_minor} with torchao {ao_minor}" for torch_minor, ao_minor in TESTED)
        warn_user("TQ804", torch=pair[0], torchao=pair[1], tested=", ".join(tested))


def _minor(version: str) -> str:
    result = re.match(r"\d+\.\d+", version)
    return result[0] if result else version
