"""Questions for a number of objects in an image: the task counting."""
