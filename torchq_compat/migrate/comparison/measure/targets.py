"""The target of ``torchq-compat compare``, passed to the process that compares."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

__all__ = ["Target"]


@dataclass(frozen=True)
class Target:
    """A script with its arguments, or ``module:function``.

    Attributes:
        fx: "yes", "no" or "auto".
        trained_qparams: whether trained models convert with the qparams they trained with, not with FX's.
    """

    name: str
    is_function: bool
    args: tuple[str, ...] = ()
    fx: str = "auto"
    trained_qparams: bool = False

    @property
    def fx_setting(self) -> bool | Literal["auto"]:
        return "auto" if self.fx == "auto" else self.fx == "yes"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Target:
        data = json.loads(text)
        return cls(**{**data, "args": tuple(data["args"])})
