"""Same class or not: two images, a hierarchy of names, a probability."""
