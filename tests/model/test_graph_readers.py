"""Under ``run`` code that walks the graph of one of our models is told that it finds no layers there."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping

from torchq_compat import convert_fx, explain, prepare_fx
from torchq_compat.errors import QuantizationWarning
from torchq_compat.model import other_tools as graph_readers

X = torch.randn(3, 4)


@pytest.fixture
def under_run() -> Iterator[None]:
    graph_readers.tell_graph_readers()
    yield
    graph_readers._TELLS.clear()


@pytest.mark.usefixtures("under_run")
def test_who_walks_a_graph_is_told_at_the_line() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        prepared = prepare_fx(nn.Sequential(nn.Linear(4, 2)).eval(), get_default_qconfig_mapping("x86"), (X,))
        prepared(X)
        copied = copy.deepcopy(prepared)
        converted = convert_fx(copied)
        explain(converted)
        torch.jit.trace(converted, X)  # type: ignore[no-untyped-call]
        torch.export.export(converted, (X,))
        print(prepared.graph, converted)
    for stage, model in (("prepared", prepared), ("converted", converted)):
        with pytest.warns(QuantizationWarning, match=f"graph of a {stage} model is torch.export's") as told:
            found = [node for node in model.graph.nodes if node.target == "0"]
        assert found == []
        assert {each.filename for each in told} == {__file__}


def test_elsewhere_nobody_is() -> None:
    prepared = prepare_fx(nn.Sequential(nn.Linear(4, 2)).eval(), get_default_qconfig_mapping("x86"), (X,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(prepared.graph.nodes) > 3
