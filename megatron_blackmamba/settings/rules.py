"""What a run may change of its config when it resumes, or leaves another run as a branch: one rule for each key.

A field names its rule as `Annotated[int, FIXED]`; otherwise its section's `rule` counts. tests/training/test_resume.py
refuses a key without a rule.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rule:
    """The answer to a changed key."""

    resume: Literal["fixed", "by name", "free"]
    """by name: only if resume.allow names the key."""
    branch: Literal["fixed", "told", "free"]
    """told: a branch may have another value than its trunk, and its log says so."""


FIXED = Rule("fixed", "fixed")
"""Another model, other data or other optimizer state: the checkpoint does not fit."""
FIXED_IN_RUN = Rule("fixed", "told")
"""The checkpoint fits, but one run keeps one value."""
BY_NAME = Rule("by name", "told")
"""Decides the weights from here on."""
LOSS_WEIGHT = Rule("by name", "fixed")
"""A key of the model that changes its training alone."""
SAME = Rule("free", "free")
"""The losses stay the same."""
ROUNDED = Rule("free", "free")
"""The losses agree within rounding."""
OTHER = Rule("free", "free")
"""The losses change, as the docs describe or the log tells."""
OTHER_DATA = Rule("free", "told")
"""A path, whose content is compared on its own."""
