"""Studies: a declared set of runs, trained one after another or as Slurm jobs, and a page of what came out."""

from megatron_blackmamba.study.config import StudyError

__all__ = ["StudyError"]
