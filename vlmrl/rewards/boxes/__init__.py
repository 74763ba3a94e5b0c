"""Boxes in answers: coordinate planes and overlap, boxes read from text, boxes written as text.

Users may import `planes` and `reading`. Begin with `reading.py`.
"""
