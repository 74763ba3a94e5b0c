"""The task `gui`: small web pages, in which the model acts by what it sees: it clicks, types and scrolls."""
