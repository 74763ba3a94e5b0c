"""Starting a run as several processes: which GPUs, the agent that starts the ranks, who watches them, Slurm."""
