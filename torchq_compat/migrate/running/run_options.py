"""The options of ``torchq-compat run``, passed from the command line to the script's process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

__all__ = ["RunOptions"]


@dataclass(frozen=True)
class RunOptions:
    """The options of ``run``.

    Attributes:
        convert: the function that replaces every conversion function; empty: the script's own choice.
        explain: absolute path of the file for the decisions; empty: none is written.
        strict: whether a module left float is an error.
        trained_qparams: whether trained models convert with the qparams they trained with, not with FX's.
    """

    convert: str = ""
    explain: str = ""
    strict: bool = False
    trained_qparams: bool = False

    @property
    def replacements(self) -> Mapping[str, str]:
        """Function the script calls -> function that replaces it."""
        if not self.convert:
            return {}
        return dict.fromkeys(("convert_fx", "convert_to_reference_fx"), self.convert)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunOptions:
        return cls(**json.loads(text))
