"""The task `pairs`: a row shows two images; the answer is the probability that they are of the same class."""
