"""Everything made from the records and scores of a run: intervals, tables, curves, comparisons, the HTML page.

Pure functions of what was recorded; nothing here measures, and nothing here needs torch.
"""
