"""Sea stars: do two photographs show the same individual?"""
