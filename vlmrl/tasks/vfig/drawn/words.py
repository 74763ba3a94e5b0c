"""Words for the labels of drawn diagrams."""

from __future__ import annotations

WORDS = tuple(
    """
    In Out Map Key Sum Log Fit Mix Add Cut Set Get Run End Top Hub Net Bus Tag Bin
    Node Gate Pool Sort Join Copy Load Save Read Send Test Plan Task Step Data Base Code Loop Root Leaf
    Core Edge Item List Lock Mask Math Menu Mesh Mode Page Path Peak Port Rank Rule Scan Seed Sink Unit User View
    Input Model Layer Block Stage State Event Store Cache Queue Stack Index Graph Token Batch Query Value Score
    Merge Split Parse Train Infer Check Align Clean Crawl Track Watch Write Frame Image Label Pixel Prior
    Source Target Sample Filter Weight Output Client Server Worker Router Sensor Signal Buffer Kernel Vector Matrix
    Encode Decode Select Reduce Expand Update Verify Report Policy Reward Teacher Student Planner Monitor Gateway
    Encoder Decoder Sampler Adapter Combine Predict Compare Archive Project Ranking Feature
    """.split()
)
"""Words of 2 to 7 letters, none twice in any spelling of capitals."""
