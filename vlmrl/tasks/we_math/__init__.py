"""Composite problems with their sub-problems: the task we_math."""
