"""Parts that tasks share whose answers are boxes in an image. This folder registers no task."""
