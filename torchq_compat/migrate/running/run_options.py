"""What ``torchq-compat run`` was asked for, on its way from the command line to the script's process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

__all__ = ["RunOptions"]


@dataclass(frozen=True)
class RunOptions:
    """Options of ``run``.

    Attributes:
        convert: the function that every conversion calls, whatever the script calls; empty: as called.
        explain: absolute path of the file the decisions are written to; empty: none.
        strict: whether a module left float is an error.
    """

    convert: str = ""
    explain: str = ""
    strict: bool = False

    @property
    def replacements(self) -> Mapping[str, str]:
        """Function the script calls -> function it gets."""
        if not self.convert:
            return {}
        return dict.fromkeys(("convert_fx", "convert_to_reference_fx"), self.convert)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunOptions:
        return cls(**json.loads(text))
