"""Drawn diagrams of shapes and arrows as SVG code, with exact labels of everything that is in them.

`figure.py` draws a figure, also the tiny ones whose code has one canonical form. `layouts.py` places its shapes and
joins them with arrows, `shapes.py` paints them and their words.
"""
