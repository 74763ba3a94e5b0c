"""The region of an image that a text describes, as one box: the task grounding."""
