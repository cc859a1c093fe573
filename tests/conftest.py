"""One thread: the models are tiny, and threads that wait for each other cost more than they do."""

import torch

torch.set_num_threads(1)
