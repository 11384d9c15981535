"""A plain implementation of the same decoding, in the style of the published code: an oracle, and something to beat."""
