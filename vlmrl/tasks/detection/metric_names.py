"""Names of the metrics of a whole set of detections. They are apart from their computation, which loads numpy."""

from __future__ import annotations

NAMES = ("map", "ap50", "ap75")
"""Average precision over all thresholds, and at an IoU of 0.5 and of 0.75."""
OF_CATEGORY = "map/"
"""Beginning of the name of a category's own metric."""
