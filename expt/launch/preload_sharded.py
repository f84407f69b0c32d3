"""What the forkserver imports beside the rest for sharded models: else each worker would, in 2
seconds of a core.
"""

from __future__ import annotations

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor

# imports torch._dynamo, by which fully_shard keeps its hooks from being compiled
torch.compiler.reset()
