"""Headless Chromium for pages that a model wrote, and for small pages of our own to act in.

`server.py` starts one browser, guards it, and relays the DevTools protocol to clients; `client.py` is their side. The
browser is the system's. It is offline: nothing that a page names is fetched.
"""
