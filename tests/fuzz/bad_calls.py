"""Prepared, converted and lowered models called with inputs they were not prepared for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import torchq_compat as tc
from tests.fuzz.outcomes import Case
from tests.helpers.histograms import coarse_qconfig_mapping

__all__ = ["cases"]

BATCH, WIDTH, STEPS = 3, 6, 4
STAGES = ("prepared", "converted", "lowered")


class Around(nn.Module):
    """A module inside another one, so that a failure in it has a path."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.part = nn.Module()
        self.part.inner = inner

    def forward(self, x: Tensor) -> Any:
        result = self.part.inner(x)
        return result[0] if isinstance(result, tuple) else result


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return self.attention(query, key, key)[0]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
        a, more = pair
        return self.linear(a) + more["b"]


class Subject(NamedTuple):
    """A model, its example, and the rank and dtype of the example."""

    model: Callable[[], nn.Module]
    example: Callable[[], tuple[Any, ...]]


def recurrent(kind: type[nn.Module], **options: Any) -> Subject:
    shape = (BATCH, WIDTH) if issubclass(kind, nn.RNNCellBase) else (STEPS, BATCH, WIDTH)
    return Subject(lambda: Around(kind(WIDTH, 5, **options)), lambda: (torch.randn(shape),))


def layer(make: Callable[[], nn.Module], *shape: int) -> Subject:
    return Subject(lambda: Around(make()), lambda: (torch.randn(shape),))


SUBJECTS: dict[str, Subject] = {
    "LSTM": recurrent(nn.LSTM),
    "LSTM in two layers": recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "GRU": recurrent(nn.GRU),
    "RNN": recurrent(nn.RNN),
    "LSTMCell": recurrent(nn.LSTMCell),
    "GRUCell": recurrent(nn.GRUCell),
    "RNNCell": recurrent(nn.RNNCell),
    "MultiheadAttention": Subject(
        Attends, lambda: (torch.randn(STEPS, BATCH, WIDTH), torch.randn(STEPS, BATCH, WIDTH))
    ),
    "Linear": layer(lambda: nn.Linear(WIDTH, 5), BATCH, WIDTH),
    "Conv1d": layer(lambda: nn.Conv1d(WIDTH, 5, 2), BATCH, WIDTH, 9),
    "Conv2d": layer(lambda: nn.Conv2d(WIDTH, 5, 2), BATCH, WIDTH, 9, 9),
    "ConvTranspose2d": layer(lambda: nn.ConvTranspose2d(WIDTH, 5, 2), BATCH, WIDTH, 9, 9),
    "LayerNorm": layer(lambda: nn.Sequential(nn.Linear(WIDTH, 5), nn.LayerNorm(5)), BATCH, WIDTH),
    "Embedding": Subject(
        lambda: Around(nn.Sequential(nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 5))),
        lambda: (torch.randint(0, 9, (BATCH, STEPS)),),
    ),
    "nested": Subject(Nested, lambda: ((torch.randn(BATCH, WIDTH), {"b": torch.randn(BATCH, WIDTH)}),)),
}


@cache
def made(name: str, stage: str) -> nn.Module:
    if stage != "prepared":
        convert = tc.convert_to_reference_fx if stage == "converted" else tc.convert_fx
        return convert(made(name, "prepared"), tc.get_default_convert_custom_config())
    torch.manual_seed(0)
    subject = SUBJECTS[name]
    example = subject.example()
    custom = tc.get_default_prepare_custom_config()
    prepared = tc.prepare_fx(subject.model().eval(), coarse_qconfig_mapping("x86"), example, custom)
    prepared(*example)
    return prepared


def call(name: str, stage: str, *args: Any) -> Any:
    return copy.deepcopy(made(name, stage))(*args)


Wrong = Callable[[Tensor], Any]
WRONG: dict[str, Wrong] = {
    "wider": lambda x: torch.cat([x, x], _channels(x)),
    "narrower": lambda x: x.narrow(_channels(x), 0, 2),
    "rank 0": lambda x: x.flatten()[0],
    "two ranks more": lambda x: x[None, None].expand(2, 2, *x.shape),
    "float64": lambda x: x.double(),
    "float16": lambda x: x.half(),
    "int64": lambda x: x.long() if x.is_floating_point() else x.float(),
    "bool": lambda x: x > 0,
    "complex": lambda x: x.to(torch.complex64),
    "meta device": lambda x: x.to("meta"),
    "None": lambda x: None,
    "number": lambda x: 3,
    "str": lambda x: "x",
    "list": lambda x: x.tolist(),
    "list of tensors": list,
    "tuple": lambda x: (x, x),
    "dict": lambda x: {"x": x},
    "numpy array": lambda x: np.asarray(x),
    "object": lambda x: object(),
    "sparse": lambda x: x.to_sparse(),
    "compressed": lambda x: x.to_sparse_csr() if x.is_floating_point() else x.to_sparse(),
    "mkldnn": lambda x: x.to_mkldnn() if x.is_floating_point() else x.to_sparse(),
    "nested tensor": lambda x: torch.nested.nested_tensor(list(x)),
    "jagged tensor": lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
    "uint8": lambda x: (x * 3).abs().to(torch.uint8) if x.is_floating_point() else x.float(),
    "int8": lambda x: (x * 3).to(torch.int8),
    "quint8": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 3, torch.quint8),
    "qint8": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 3, torch.qint8),
    "qint32": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 3, torch.qint32),
    "object array": lambda x: np.asarray([x, None], dtype=object),
    "generator": iter,
}


def _channels(x: Tensor) -> int:
    return 1 if x.dim() == 4 or (x.dim() == 3 and x.shape[1] == WIDTH) else x.dim() - 1


#: (subject, what is wrong) -> why the call may succeed. "*" stands for any subject.
ACCEPTED: dict[tuple[str, str], str] = {
    ("Embedding", "wider"): "more indices",
    ("Embedding", "narrower"): "fewer indices",
    ("Embedding", "two ranks more"): "as torch: any rank",
    ("Embedding", "rank 0"): "as torch: any rank",
    ("Linear", "two ranks more"): "as torch: any rank",
    ("LayerNorm", "two ranks more"): "as torch: any rank",
    ("nested", "two ranks more"): "as torch: any rank",
    ("*", "float16"): "is computed in float32, as torchao's quantize and our cells do",
    ("*", "meta device"): "as torch: shapes without values",
}
#: A prepared recurrent or attention module computes in float32 and returns the dtype of its input.
CASTS = ("LSTM", "LSTM in two layers", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell", "MultiheadAttention")


def accepted(stage: str, name: str, what: str) -> str:
    if what == "float64" and stage == "prepared" and name in CASTS:
        return "computed in float32 and given back as it came"
    if what == "float64" and stage == "lowered":
        return "quantized to the integers of the same values in float32"
    return ACCEPTED.get((name, what), ACCEPTED.get(("*", what), ""))


LISTS = "torch's generated code takes a list for a tuple: the same elements in the same order"


def cases() -> Iterator[Case]:
    for name, subject in SUBJECTS.items():
        for stage in STAGES:
            this = partial(call, name, stage)
            for what, wrong in WRONG.items():
                yield Case(
                    f"{stage} {name}: {what}",
                    lambda c=this, s=subject, w=wrong: c(*_with_first(s.example(), w)),
                    accepted=accepted(stage, name, what),
                )
            yield Case(f"{stage} {name}: no arguments", this)
            yield Case(
                f"{stage} {name}: one too many", lambda c=this, s=subject: c(*s.example(), *s.example())
            )
    yield from _of_embedding()
    yield from _of_nested()


def _with_first(args: tuple[Any, ...], wrong: Wrong) -> tuple[Any, ...]:
    first, *rest = args
    if isinstance(first, tuple):
        return ((wrong(first[0]), *first[1:]), *rest)
    return (wrong(first), *rest)


def _of_embedding() -> Iterator[Case]:
    for stage in STAGES:
        for index in (9, -1, 2**40):
            yield Case(
                f"{stage} Embedding: index {index}",
                lambda s=stage, i=index: call("Embedding", s, torch.full((2, 2), i)),
            )


def _of_nested() -> Iterator[Case]:
    x = torch.randn(BATCH, WIDTH)
    structures: dict[str, Any] = {
        "a list for the tuple": [x, {"b": x}],
        "no dict": (x, x),
        "another key": (x, {"c": x}),
        "one key more": (x, {"b": x, "c": x}),
        "deeper": ((x,), {"b": x}),
        "one element more": (x, {"b": x}, x),
        "None inside": (x, {"b": None}),
        "empty": (),
    }
    for stage in STAGES:
        for name, value in structures.items():
            yield Case(
                f"{stage} nested: {name}",
                partial(call, "nested", stage, value),
                accepted=LISTS if name == "a list for the tuple" else "",
            )
