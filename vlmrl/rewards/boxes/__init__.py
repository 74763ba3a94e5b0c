"""Boxes in answers: coordinate planes, reading, writing, overlap."""
