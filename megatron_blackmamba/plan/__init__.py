"""Estimates for a run before it starts, without a GPU: parameters, FLOPs, memory, traffic, time, layouts."""
