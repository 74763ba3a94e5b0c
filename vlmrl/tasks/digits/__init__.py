"""Pairs of handwritten digits: the task of the demo."""
