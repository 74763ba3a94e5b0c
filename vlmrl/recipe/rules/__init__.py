"""Rules that join several keys of a recipe. Each returns problems with a place and a hint.

They are divided by what they are about: the training, the engine and its processes, files and rewards, evaluation.
Begin with `training.py`.
"""
