"""Datasets: tables of users and prepared folders become rows, images, token ids and pixels.

`open_dataset.py` chooses between `table_dataset.py` and `dataset.py`, which has the interface. `encode.py` makes token
ids and pixels of messages, `sampler.py` draws prompts, `doctor.py` checks a dataset. Begin with `dataset.py`.
"""
