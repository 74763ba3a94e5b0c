"""Boxes and points in answers: coordinate planes, reading, writing, overlap."""
