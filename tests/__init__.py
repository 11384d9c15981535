"""The tests mirror the package; this file keeps their name apart from other packages' `tests`."""
