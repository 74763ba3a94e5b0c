"""Drawn diagrams of shapes and arrows as SVG code, with exact labels of everything that is in them."""
