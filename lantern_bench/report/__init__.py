"""Everything made from the records and scores of a run, without torch: tables, curves, comparisons, the HTML page."""
