"""What the processes of ``in_processes`` are copies of, in which nothing made threads, as autograd does."""

from __future__ import annotations

import gc

import pytest  # noqa: F401
import torch
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torchao.quantization.pt2e  # noqa: F401
from torch.ao.quantization import HistogramObserver, MinMaxObserver

from tests.distributed import test_fully_shard, test_ranks  # noqa: F401 - as the ranks import them

# What ranks begin with: they copy it.
torch.set_num_threads(1)
for observer in MinMaxObserver, HistogramObserver:
    test_ranks.prepared_on.itself(torch.device("cpu"), observer)
test_ranks.trainable_on.itself(torch.device("cpu"), test_ranks.Net)
# No process looks through what all have in common, as in around_tests.
gc.collect()
gc.freeze()
gc.set_threshold(100_000, 50, 100)
