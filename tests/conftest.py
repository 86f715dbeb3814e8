"""Settings of every test."""

import torch

torch.set_num_threads(1)  # tiny products gain nothing from threads that wait for each other on busy cores
