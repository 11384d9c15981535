"""The embedded family: a miniature text-to-image world that ships inside the package.

Scenes of paper lanterns, their captions, the recipe that trains the five models, and the weights it made. Its figures
describe this miniature only; they are never LlamaGen's.
"""
