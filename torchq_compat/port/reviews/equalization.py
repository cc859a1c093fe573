"""Find ``_equalization_config``, which has no counterpart."""

from __future__ import annotations

from collections.abc import Iterator

from torchq_compat.port.constructs import Construct, Site
from torchq_compat.port.legacy_api.fx_calls import fx_calls
from torchq_compat.port.reviews.review import ManualReview
from torchq_compat.port.source.parsed import ParsedSource

REFUSAL = "PT2E has none; equalize the float model before, as the guide shows"


def find(source: ParsedSource) -> Iterator[Site]:
    for call in fx_calls(source):
        arg = call.arg("_equalization_config")
        if arg is not None and source.code(arg.value) != "None":
            yield Site(
                "TQ202",
                source.start(arg),
                source.code(arg),
                refusal=REFUSAL,
            )


CONSTRUCT = Construct(
    code="TQ202",
    title="equalization",
    becomes="equalizing the float model, before prepare_fx",
    guide="""\
`_equalization_config` has no counterpart in PT2E. What it does to two layers can be done to the float model
before it is prepared; per-channel weights give most of the gain by themselves.

```python
import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping

from torchq_compat import convert_fx, prepare_fx


def equalize(first: nn.Linear, second: nn.Linear, x: torch.Tensor) -> None:
    # Between two layers, with a ReLU there: give each channel the range that the second layer asks for.
    with torch.no_grad():
        scale = (second.weight.abs().amax(0) / torch.relu(first(x)).amax(0).clamp(min=1e-6)).sqrt()
        first.weight.mul_(scale[:, None])
        first.bias.mul_(scale)
        second.weight.div_(scale)


def sqnr(model: nn.Module, x: torch.Tensor) -> float:
    prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
    prepared(x)
    y = model(x)
    error = y - convert_fx(prepared)(x)
    return float(10 * torch.log10(y.square().sum() / error.square().sum()).detach())


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
x = torch.randn(256, 8)
with torch.no_grad():
    model[0].weight[:2] *= 12  # two channels that are much wider than the others
    model[2].weight[:, :2] /= 12
before = sqnr(model, x)
equalize(model[0], model[2], x)
assert sqnr(model, x) > before + 6  # dB
```
""",
)

REVIEW = ManualReview(CONSTRUCT, find)
