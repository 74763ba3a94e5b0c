"""Start of a run in several processes: requests, GPUs, the agent that starts and watches the ranks, Slurm.

`request.py` has the arguments of a command, `gpu_assignment.py` says which GPU does what, `ranks.py` starts the
processes and ends them together. Begin with `start.py`.
"""
