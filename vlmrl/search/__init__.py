"""Search for tools: an index of passages on this machine, and search engines over HTTP."""
