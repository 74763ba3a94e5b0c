"""Birds: do two photographs show the same species?"""
