"""Checks of a model: is decoding lossless where it claims to be, and what does a relaxed rule cost?"""
