"""Figures to pictures: formatted tables, charts and the HTML page. No statistics, no torch."""
