"""Rewards that a judge gives: a model that compares two pictures by a rubric."""
