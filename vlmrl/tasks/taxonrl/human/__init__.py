"""Faces: do two photographs show the same person?"""
