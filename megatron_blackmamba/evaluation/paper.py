"""The paper's table of scores: zero-shot, lm-eval 0.3.0; HellaSwag without length normalisation."""

from collections.abc import Mapping
from typing import NamedTuple

from megatron_blackmamba.formats.evaluations import TaskResult

TASKS = ("hellaswag", "piqa", "winogrande", "lambada_openai", "arc_easy", "arc_challenge", "openbookqa")
"""The columns of the table. The paper plots BoolQ over training, but gives no figure for it."""
METRIC = "acc"


class PaperModel(NamedTuple):
    """A row of the table."""

    name: str
    forward: str
    """Forward-pass parameters."""
    total: str
    training_flops: float
    scores: tuple[float, ...]
    average: float

    @property
    def label(self) -> str:
        """Return name and size, such as "BlackMamba 342M/1.5B"."""
        return f"{self.name} {self.forward}" + ("" if self.total == self.forward else f"/{self.total}")

    def score(self, task: str) -> float | None:
        """Return the accuracy on a task; None: the paper gives none."""
        return self.scores[TASKS.index(task)] if task in TASKS else None

    def beside(self, results: Mapping[str, TaskResult]) -> list[str]:
        """Return the row on the tasks of `results`; in brackets, a model's distance from it in standard errors."""
        cells = [self.label]
        for task, theirs in zip(TASKS, self.scores, strict=True):
            if task in results:
                ours, error = results[task].metrics[METRIC], results[task].errors.get(METRIC)
                cells.append(f"{theirs:.3f}" + (f" ({(ours - theirs) / error:+.1f})" if error else ""))
        return cells


ROWS = (
    PaperModel("Cerebras-GPT", "111M", "111M", 2.6e18, (0.268, 0.594, 0.488, 0.194, 0.38, 0.166, 0.118), 0.315),
    PaperModel("OPT", "125M", "125M", 4.1e20, (0.313, 0.63, 0.503, 0.379, 0.435, 0.189, 0.166), 0.371),
    PaperModel("Pythia", "160M", "160M", 4.1e20, (0.293, 0.627, 0.519, 0.389, 0.452, 0.181, 0.16), 0.375),
    PaperModel("Cerebras-GPT", "256M", "256M", 1.3e19, (0.286, 0.613, 0.511, 0.293, 0.41, 0.17, 0.158), 0.347),
    PaperModel("BlackMamba", "342M", "1.5B", 6.4e20, (0.365, 0.690, 0.526, 0.493, 0.561, 0.241, 0.196), 0.439),
    PaperModel("OPT", "350M", "350M", 1.1e21, (0.366, 0.644, 0.523, 0.452, 0.44, 0.207, 0.176), 0.395),
    PaperModel("Mamba", "343M", "343M", 8.0e20, (0.335, 0.665, 0.516, 0.453, 0.540, 0.212, 0.198), 0.417),
    PaperModel("Pythia", "410M", "410M", 1.1e21, (0.333, 0.668, 0.53, 0.505, 0.504, 0.213, 0.178), 0.419),
    PaperModel("BlackMamba", "631M", "2.8B", 1.2e21, (0.397, 0.712, 0.521, 0.542, 0.603, 0.245, 0.242), 0.466),
    PaperModel("Pythia", "1B", "1B", 2.2e21, (0.376, 0.705, 0.545, 0.566, 0.559, 0.243, 0.196), 0.456),
    PaperModel("OPT", "1.3B", "1.3B", 3.2e21, (0.4537, 0.717, 0.595, 0.579, 0.57, 0.234, 0.234), 0.478),
    PaperModel("Cerebras-GPT", "1.3B", "1.3B", 2.8e20, (0.384, 0.664, 0.521, 0.462, 0.508, 0.224, 0.166), 0.410),
    PaperModel("Pythia", "1.4B", "1.4B", 3.2e21, (0.398, 0.711, 0.565, 0.604, 0.576, 0.256, 0.204), 0.474),
    PaperModel("OPT", "2.8B", "2.8B", 6.1e21, (0.606, 0.738, 0.61, 0.637, 0.609, 0.268, 0.25), 0.510),
    PaperModel("Cerebras-GPT", "2.8B", "2.8B", 1.1e21, (0.488, 0.701, 0.559, 0.567, 0.571, 0.246, 0.206), 0.462),
    PaperModel("Pythia", "2.8B", "2.8B", 6.1e21, (0.451, 0.737, 0.612, 0.654, 0.629, 0.288, 0.22), 0.513),
)
"""As printed. HellaSwag of the last three rows looks length-normalised; the paper says that it is not."""

MAIN = tuple(row for row in ROWS if row.name in ("BlackMamba", "Mamba"))
"""The models that the paper trained itself."""
