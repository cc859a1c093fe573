"""What the processes of ``in_processes`` are copies of, in which nothing made threads, as autograd does."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torchao.quantization.pt2e  # noqa: F401

import torchq_compat.quantize_fx  # noqa: F401

torch.export.export(torch.nn.Linear(1, 1), (torch.ones(1, 1),))  # its first call imports
