"""From runs to processes: workers on this machine, under torchrun, under Slurm."""
