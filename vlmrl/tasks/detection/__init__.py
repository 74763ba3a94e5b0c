"""All objects of a category in an image, as boxes with confidences: the task detection."""
