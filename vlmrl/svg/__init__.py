"""SVG code of models: found in a response, read with limits, cleaned to what may be drawn, and drawn in workers.

The text is hostile input. Nothing here opens a file or an address that the text names, and every step has a limit.
"""
