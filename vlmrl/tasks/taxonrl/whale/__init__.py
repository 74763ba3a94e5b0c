"""Whales: do two photographs show the same individual?"""
