"""Training: the steps of reinforcement learning and of supervised training, from a session to a checkpoint.

`start.py` opens a session, `loop.py` does what each step needs, `rl.py` and `sft.py` are the two kinds of training.
`collect.py` makes a batch of rollouts, `update.py` the gradient, `journal.py` the record. Begin with `rl.py`.
"""
