"""What the processes of ``in_processes`` are copies of, in which nothing made threads, as autograd does."""

from __future__ import annotations

import gc

import pytest  # noqa: F401
import torch
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torchao.quantization.pt2e  # noqa: F401
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc

# The first calls import.
torch.set_num_threads(1)
tc.prepare_fx(torch.nn.Linear(1, 1).eval(), get_default_qconfig_mapping("x86"), (torch.ones(1, 1),))
# No process looks through what all have in common, as in around_tests.
gc.collect()
gc.freeze()
gc.set_threshold(100_000, 50, 100)
