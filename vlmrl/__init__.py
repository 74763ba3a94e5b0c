"""vlmrl: reinforcement learning of vision-language models, from a dataset to a model you can trust."""

__version__ = "0.1.0"
