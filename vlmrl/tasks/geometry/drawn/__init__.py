"""Drawn geometry: figures with labels as a textbook prints them, and questions with exact answers.

`problem.py` holds what a figure consists of, `page.py` finds free places for its labels and draws it. The problems are
in `angles.py` (also circles) and `lengths.py` (also areas); `collection.py` draws the rows of a dataset.
"""
