"""The report of a run as one HTML file: answer, curves, evaluations, examples, reward.

`page.py` puts the parts together, `page_parts.py` escapes and shows texts and pictures, `plots.py` and `curves.py`
draw. Nothing is loaded from elsewhere. Begin with `page.py`.
"""
