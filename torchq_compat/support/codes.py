"""The register of codes, ``codes.toml``, and its warnings, decisions and errors. Imports no torch."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parents[1] / "codes.toml"
#: First digit of a code -> what its range is about.
RANGES = {
    "1": "rewritten",
    "2": "manual review",
    "3": "settings without effect",
    "4": "left float or approximated",
    "5": "other numbers than FX",
    "6": "sizes and capture",
    "7": "export and deployment",
    "8": "environment",
    "9": "errors",
}


class Code(NamedTuple):
    """An entry of the register.

    Attributes:
        code: ``TQ405``.
        severity: ``note``, ``warning`` or ``error``.
        title: the cause, in a few words.
        hint: what to do.
        test: the test that raises it, below ``tests/``.
        text: what is said, with its places in braces; of a decision, its reason. Empty for errors, whose
            texts stand where the check is.
    """

    code: str
    severity: str
    title: str
    hint: str
    test: str
    text: str = ""

    @property
    def anchor(self) -> str:
        """The anchor in the guide's page of codes."""
        return self.code.lower()

    @property
    def advice(self) -> str:
        """The hint as a sentence."""
        return self.hint[0].upper() + self.hint[1:]


class KnownDifference(NamedTuple):
    """A difference from FX, where FX is wrong or cannot.

    Attributes:
        code: TQ5xx.
        fx: what FX does.
        here: what this package does.
        test: the file that asserts both, below ``tests/``.
        anchor: its place in the guide, if ``compare`` points there.
    """

    code: str
    fx: str
    here: str
    test: str
    anchor: str = ""

    @property
    def sentence(self) -> str:
        """What FX does, what happens here, and the code."""
        return f"FX: {self.fx}. Here: {self.here}. [{self.code}]".replace("`", "")


REGISTER = tomllib.loads(FILE.read_text())
CODES = {entry["code"]: Code(**entry) for entry in REGISTER["code"]}
DIFFERENCES = {entry["code"]: KnownDifference(**entry) for entry in REGISTER["known"]}


def said(code: str, /, **places: object) -> str:
    """Return the text of ``code`` with its ``places`` filled in."""
    return CODES[code].text.format(**places)
