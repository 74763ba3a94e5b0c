"""Gorillas: do two photographs show the same individual?"""
