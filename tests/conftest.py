"""One thread: the models are tiny, and threads that wait for each other cost more than they do."""

import os

import torch

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the scripts that tests start
