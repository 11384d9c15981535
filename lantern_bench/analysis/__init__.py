"""From records to figures: intervals, tests and the rows of the tables. No torch, no drawing."""
