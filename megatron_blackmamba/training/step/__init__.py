"""Takes a step: batches, gradients, update, learning rate and position; validation uses the same code."""
