"""Checks of correctness: certificates, models, installations, finished runs. No speed figures."""
