"""Starting a run as several processes: requests, GPUs, the agent that starts the ranks, their watch, queues, Slurm."""
