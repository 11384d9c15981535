"""The mathematics of decoding: distributions, draft trees, relaxed acceptance and verification, in torch.

Nothing here knows an architecture or a file; models offer what `interface.py` asks for and the loop does the rest.
The binding text is docs/algorithms.md; every public function names the section that it follows.
"""
