"""From a config to a running job: the doctor that looks at a machine, and the Slurm jobs that use many of them."""
