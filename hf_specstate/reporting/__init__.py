"""Speculative states to look at: a table, texts in colour, charts, and a page that needs nothing but a browser."""
