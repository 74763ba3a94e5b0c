"""Fungi: do two photographs show the same species?"""
