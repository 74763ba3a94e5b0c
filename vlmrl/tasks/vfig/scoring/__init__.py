"""Comparison of two drawings element by element: what can be seen of each, and how well the elements correspond."""
