"""Words for the labels of drawn diagrams."""

from __future__ import annotations

_TEXT = """
    Map Key Sum Log Fit Mix Add Cut Set Run Top Hub Net Bus Node Pool Sort Join Copy Load Save Read Send Test
    Task Step Data Base Loop Root Leaf Edge Item List Mask Math Menu Mesh Page Path Peak Rule Scan Seed Sink
    Unit User View Input Model Layer Block Stage State Event Store Cache Queue Stack Index Graph Token Batch
    Query Value Score Merge Split Parse Train Infer Check Align Clean Crawl Track Watch Write Frame Image
    Label Pixel Prior Source Target Filter Weight Output Client Server Worker Router Sensor Signal Buffer
    Kernel Vector Matrix Select Reduce Expand Update Verify Report Policy Reward Teacher Student Planner
    Monitor Gateway Encoder Decoder Sampler Adapter Combine Predict Compare Archive Project Ranking Feature
"""
WORDS = tuple(_TEXT.split())
"""Words of 3 to 8 letters. None is part of another, so that a match of parts of labels confuses no two of them."""
