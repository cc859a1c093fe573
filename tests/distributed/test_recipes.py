"""The recipes of the guide's pages run, in two and in four processes, and make one model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import torchq_compat
from tests.distributed.test_ranks import same
from tests.helpers.oracle import sqnr
from tests.helpers.processes import in_processes

GUIDE = Path(torchq_compat.__file__).parents[1] / "migration" / "guide"
PAGES = "".join((GUIDE / name).read_text() for name in ("processes.md", "train-processes.md"))
RECIPES = dict(re.findall(r"^```py (\w+)\n(.*?)^```", PAGES, re.MULTILINE | re.DOTALL))


def run_recipe(rank: int, ranks: int, name: str) -> dict[str, Any]:
    dist.barrier()  # Another rank may still be connecting.
    dist.destroy_process_group()
    namespace: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(RECIPES["setup"], "setup", "exec"), namespace)
    before = {k: v.detach().clone() for k, v in namespace["model"].state_dict().items()}
    exec(compile(RECIPES[name], name, "exec"), namespace)
    converted, x = namespace["converted"], torch.linspace(-1, 1, 16).reshape(2, 8)
    state = namespace["prepared"].state_dict().items()
    trained = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in state}
    first = next(iter(before.values()))
    return {
        "state": {k: v for k, v in converted.state_dict().items() if isinstance(v, torch.Tensor)},
        "output": converted(x),
        "float": namespace["model"](x).detach(),
        "moved": not any(v.shape == first.shape and torch.equal(v, first) for v in trained.values()),
    }


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["calibrate", "ddp", "fsdp"])
def test_a_recipe_makes_one_model(name: str, ranks: int, tmp_path: Path) -> None:
    results = in_processes(run_recipe, ranks, tmp_path, name)
    for result in results:
        assert same(result["state"], results[0]["state"])
        assert torch.equal(result["output"], results[0]["output"])
        assert result["moved"] == (name != "calibrate")
    if name == "calibrate":
        assert 25 < sqnr(results[0]["float"], results[0]["output"]) < 60


def test_the_pages_have_the_three_recipes() -> None:
    assert [*RECIPES] == ["setup", "calibrate", "ddp", "fsdp"]
