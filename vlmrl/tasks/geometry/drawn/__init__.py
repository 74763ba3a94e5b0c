"""Drawn geometry: figures with labels as a textbook prints them, and questions with exact answers.

`sketch.py` holds what a figure consists of, `labels.py` finds free places for its labels, `page.py` draws it. The
problems are in `angles.py`, `lengths.py`, `circles.py` and `areas.py`; `collection.py` draws the rows of a dataset.
"""
