"""Drawn diagrams of shapes and arrows as SVG code, with exact labels of everything that is in them.

`figure.py` draws a figure. `layouts.py` places its shapes, `shapes.py` and `fills.py` paint them, `labelled.py` adds
words and stacks, `arrows.py` joins them. `simple.py` draws tiny figures whose code has one canonical form.
"""
