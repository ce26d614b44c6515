"""What a run will need, told before it starts and without a GPU: parameters, FLOPs, memory, traffic, time, layouts."""
