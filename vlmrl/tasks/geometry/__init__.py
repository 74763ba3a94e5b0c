"""Geometry questions about a figure, with one exact answer: the tasks geometry3k and mm_math."""
