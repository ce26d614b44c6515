"""What every command needs at a terminal: Ctrl-C, progress, options. No torch: this is imported before all else."""
