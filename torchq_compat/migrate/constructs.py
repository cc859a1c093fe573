"""What ``scan`` finds: a code for every FX construct, what it becomes, and where the guide tells more."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["CONSTRUCTS", "GUIDE", "Construct"]

GUIDE = "migration/README.md"


class Construct(NamedTuple):
    """One kind of legacy code.

    Attributes:
        code: stable, for filters and machines.
        title: what it is.
        becomes: what it is replaced by.
    """

    code: str
    title: str
    becomes: str

    @property
    def anchor(self) -> str:
        """The section of the guide, as GitHub names the anchor of its heading."""
        return re.sub(r"[^\w\- ]", "", f"{self.code} {self.title}".lower()).replace(" ", "-")

    @property
    def link(self) -> str:
        return f"{GUIDE}#{self.anchor}"


#: TQ1xx: ``rewrite`` knows how; TQ2xx: a person has to look.
CONSTRUCTS = {
    construct.code: construct
    for construct in (
        Construct(
            "TQ101", "quantize_fx functions", "the function of the same name in torchq_compat.quantize_fx"
        ),
        Construct("TQ102", "LSTM part helpers", "the public function in torchq_compat.lstm_utils"),
        Construct("TQ103", "custom config classes", "the same class from torchq_compat.custom_config"),
        Construct("TQ104", "old namespaces", "the same object under torch.ao"),
        Construct("TQ105", "qconfig_dict", "QConfigMapping"),
        Construct(
            "TQ106", "custom config dicts", "PrepareCustomConfig, ConvertCustomConfig, FuseCustomConfig"
        ),
        Construct("TQ107", "renamed keywords", "the keyword's name since torch 1.13"),
        Construct("TQ108", "is_reference", "convert_to_reference_fx"),
        Construct("TQ109", "functions that return dicts", "the function that returns the object"),
        Construct("TQ110", "TorchScript", "torch.export.export, save and load"),
        Construct("TQ201", "missing example_inputs", "a tuple with one example of every argument"),
        Construct("TQ202", "equalization", "nothing: PT2E has none; use per-channel weights"),
        Construct("TQ203", "FX engine internals", "nothing with the same shape; see the guide"),
        Construct("TQ204", "legacy names in strings", "the new name, if the string is used as one"),
        Construct("TQ205", "saving whole models", "model.state_dict(), or torch.export.save"),
    )
}
