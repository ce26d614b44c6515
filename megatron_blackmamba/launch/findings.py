"""The findings of the doctor: one line each, with advice for every problem."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "note", "warning", "problem"]
"""note: an optional part is absent; warning: works, but not as well as it could; problem: a run will fail."""


@dataclass(frozen=True)
class Finding:
    part: str
    name: str
    found: str
    status: Status = "ok"
    advice: str = ""

    @classmethod
    def judge(
        cls, part: str, name: str, found: str, good: bool, advice: str, otherwise: Status = "problem"
    ) -> "Finding":
        """Return a finding: fine, or else with status `otherwise` and the advice."""
        return cls(part, name, found) if good else cls(part, name, found, otherwise, advice)


@dataclass(frozen=True)
class Examination:
    """Everything found on this host, and what to type next."""

    host: str
    findings: list[Finding]
    next_command: str

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status == "problem"]

    def to_json(self) -> dict[str, Any]:
        return {
            "host": self.host,
            "healthy": not self.problems,
            "findings": [asdict(finding) for finding in self.findings],
            "next_command": self.next_command,
        }
