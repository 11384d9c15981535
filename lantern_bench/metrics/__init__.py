"""Instruments: what is read off pictures and machines.

Fidelity goes through torch-fidelity and CLIP scores through open_clip, so that a figure here means what it means
elsewhere; what they are fed, and what is written down beside their answers, is decided in this folder.
"""
