"""Figures as SVG code: a picture of a diagram is turned into the code that draws it."""
