"""Records a run for people: steps and events in files, on a terminal, in TensorBoard and wandb; traces."""
