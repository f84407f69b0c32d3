"""torch starts a process's autograd threads at its first backward pass, where a device is known
that needs some.

Fake tensors make one known; were theirs the first pass, no rank that a later test forks could have
one."""

import torch

torch.ones(1, requires_grad=True).sum().backward()
