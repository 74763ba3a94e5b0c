"""A table of one's own: the rows bring the prompt, the user brings the reward."""
