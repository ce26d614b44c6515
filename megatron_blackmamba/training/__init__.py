"""The loop, and beside it what a step is, how it is judged and what one sees of it, one file each."""
