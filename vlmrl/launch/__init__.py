"""Starting a run as several processes: which cards, the agent that starts the ranks, who watches them, Slurm."""
