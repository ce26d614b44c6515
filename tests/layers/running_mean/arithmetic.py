"""The mean of all tokens so far, for training and decoding."""

import torch


def mean(x_BLD, reset_BL):
    """Return the mean of each document's tokens so far."""
    return sums(x_BLD, reset_BL) / sums(torch.ones_like(x_BLD[..., :1]), reset_BL)


def sums(x_BLD, reset_BL):
    """Return the sum of each document's tokens so far; a document begins where reset_BL is true."""
    sums_BLD = x_BLD.cumsum(1)
    if reset_BL is None:
        return sums_BLD
    place_L = torch.arange(x_BLD.shape[1], device=x_BLD.device)
    first_BL1 = torch.where(reset_BL, place_L, 0).cummax(1).values[..., None]
    return sums_BLD - (sums_BLD - x_BLD).gather(1, first_BL1.expand_as(x_BLD))
