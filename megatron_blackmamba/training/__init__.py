"""The training loop, and one module each for the step, the guard, the checks and the display."""
