"""Start of a run in several processes: requests, GPUs, agent that starts the ranks, watch over them, Slurm."""
