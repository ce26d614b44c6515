"""An example of a layer as somebody else would add it: the mean of all tokens so far, between two projections."""
