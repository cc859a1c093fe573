"""``torchrun -m torchq_compat run SCRIPT``: one report, from rank 0, and the script's exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.warm_python import warm_python

SCRIPT = """
import sys

import torch
import torch.distributed as dist
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

import torchq_compat

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU()).eval()
prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), (torch.randn(3, 4),))
torch.manual_seed(dist.get_rank())
prepared(torch.randn(50, 4) * (1 + dist.get_rank()))
torchq_compat.merge_observers(prepared)
converted = convert_fx(prepared)
sums = [None] * dist.get_world_size()
dist.all_gather_object(sums, converted(torch.ones(3, 4)).tolist())
print("equal" if sums[0] == sums[-1] else "other")
dist.destroy_process_group()
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("code", "ranks"), [(0, 1), (3, 2)])
def test_one_report_and_the_exit_code(code: int, ranks: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    ours = ["-m", "torchq_compat", "run", "--explain", "explained.json", "script.py", str(code)]
    done = warm_python(*torchrun, *ours, cwd=tmp_path)
    assert done.stdout.count("equal") == ranks, done.stderr
    assert done.stderr.count("torchq-compat: script.py") == 1, done.stderr
    assert (done.returncode == 0) == (code == 0)
    if code:
        assert f"exitcode  : {code} " in done.stderr
    assert json.loads((tmp_path / "explained.json").read_text())
