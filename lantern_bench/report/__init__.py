"""Looking at what was recorded: intervals, tables, curves.

Pure functions of the records and scores of a run; nothing here measures, and nothing here needs torch.
"""
