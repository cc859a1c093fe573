"""The register of codes, ``codes.toml``, and its warnings, decisions and errors. Imports no torch."""

import string
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_name("codes.toml")
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
        text: what is said, with its places in braces; of a decision, its reason.
        says: of an error with several texts, each with its hint, by name.
    """

    code: str
    severity: str
    title: str
    hint: str
    test: str
    text: str = ""
    says: Mapping[str, list[str]] = {}

    @property
    def anchor(self) -> str:
        """The anchor in the guide's page of codes."""
        return self.code.lower()

    @property
    def page(self) -> str:
        """Its page of the guide: one for TQ3xx, TQ4xx, TQ5xx to TQ8xx, and TQ9xx."""
        return f"codes-{'5' if self.code[2] in '5678' else self.code[2]}xx.md"

    @property
    def texts(self) -> list[tuple[str, str]]:
        """What it says, each text with its hint; nothing where the text is put together elsewhere."""
        alone = [] if self.text in ("", "{reason}") else [(self.text, self.hint)]
        return [*alone, *((text, hint) for text, hint in self.says.values())]

    @property
    def advice(self) -> str:
        """The hint as a sentence, unless it begins with code."""
        return self.hint[0].upper() + self.hint[1:] if self.hint.split()[0].isalpha() else self.hint


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


#: ``TQ405``, or ``TQ901.rank`` where a code has several texts -> its text and its hint.
TEXTS = {code: (entry.text, entry.hint) for code, entry in CODES.items()} | {
    f"{code}.{name}": (text, hint)
    for code, entry in CODES.items()
    for name, (text, hint) in entry.says.items()
}


class _Formatter(string.Formatter):
    """Shows, of a place ``{value:kind}``, the name of its class; of an error, ``{cause:error}``, also its
    text, ``{cause:line}`` the first line of it."""

    def format_field(self, value: Any, format_spec: str) -> str:
        match format_spec:
            case "kind":
                return type(value).__name__
            case "error":
                return f"{type(value).__name__}: {value}"
            case "line":
                return error_line(value)
        return str(format(value, format_spec))


def error_line(error: BaseException) -> str:
    """Return the class of ``error`` and the first line of its text."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"


def filled(text: str, places: Mapping[str, object]) -> str:
    """Return ``text`` with its ``places`` filled in."""
    return _Formatter().vformat(text, (), places)


def said(code: str, /, **places: object) -> str:
    """Return the text of ``code`` with its ``places`` filled in."""
    return filled(CODES[code].text, places)
