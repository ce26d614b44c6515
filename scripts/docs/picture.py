"""Draw the picture of the architecture, in a light and a dark version: `python -m scripts.docs.picture`."""

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
THEMES = {
    "light": {
        "text": "#1f2328",
        "muted": "#59636e",
        "line": "#59636e",
        "mamba": "#ddf4ff",
        "moe": "#fff1e5",
        "box": "#f6f8fa",
    },
    "dark": {
        "text": "#e6edf3",
        "muted": "#9198a1",
        "line": "#9198a1",
        "mamba": "#0c2d6b",
        "moe": "#5a2a02",
        "box": "#21262d",
    },
}
WIDTH, HEIGHT = 890, 305


@dataclass
class Drawing:
    """Shapes of an SVG, in the colours of one theme."""

    colours: dict[str, str]

    def __post_init__(self) -> None:
        self.shapes: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, fill: str, *lines: str) -> None:
        c = self.colours
        self.shapes.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{c[fill]}" stroke="{c["line"]}"/>'
        )
        for number, line in enumerate(lines):
            middle = y + h / 2 + 5 + 17 * (number - (len(lines) - 1) / 2)
            self.text(x + w / 2, middle, line, "text" if number == 0 else "muted", 14 if number == 0 else 12)

    def text(self, x: float, y: float, line: str, colour: str = "muted", size: int = 12) -> None:
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="middle"'
            f' fill="{self.colours[colour]}">{line}</text>'
        )

    def arrow(self, *points: tuple[float, float]) -> None:
        path = " L ".join(f"{x:g} {y:g}" for x, y in points)
        self.shapes.append(
            f'<path d="M {path}" fill="none" stroke="{self.colours["line"]}" stroke-width="1.5"'
            ' marker-end="url(#tip)"/>'
        )

    def svg(self) -> str:
        title = "Architecture: embedding, alternating Mamba and mixture-of-experts blocks, norm, tied head"
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
                ' font-family="system-ui, sans-serif">',
                f"<title>{title}</title>",
                '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
                ' orient="auto">'
                f'<path d="M 0 0 L 8 4 L 0 8 z" fill="{self.colours["line"]}"/></marker></defs>',
                *self.shapes,
                "</svg>",
                "",
            ]
        )


def draw(theme: str) -> str:
    """Return the picture in one theme."""
    d = Drawing(THEMES[theme])
    stack = [
        ("box", 110, ("Embedding", "tokens")),
        ("mamba", 120, ("Mamba block", "letter M")),
        ("moe", 120, ("Expert block", "letter E")),
        ("mamba", 120, ("Mamba block", "letter M")),
        ("moe", 120, ("Expert block", "letter E")),
        ("box", 110, ("Norm, head", "tied weights")),
    ]
    x, y, h = 10.0, 30.0, 56.0
    for number, (fill, w, lines) in enumerate(stack):
        if number:
            d.arrow((x - 28, y + h / 2), (x - 2, y + h / 2))
        d.box(x, y, w, h, fill, *lines)
        x += w + 30
    d.text(WIDTH / 2, 20, "residual stream in fp32: each block adds its output, x + mix(norm(x))")
    _inside_mamba(d)
    _inside_experts(d)
    return d.svg()


def _inside_mamba(d: Drawing) -> None:
    """Draw the parts of a Mamba block in the lower left."""
    d.text(215, 130, "Mamba block", "text", 14)
    parts = [("norm",), ("in_proj", "x, z"), ("causal", "conv1d"), ("selective", "scan"), ("gate z", "out_proj")]
    for number, lines in enumerate(parts):
        x = 10 + 86 * number
        if number:
            d.arrow((x - 12, 182), (x - 1, 182))
        d.box(x, 150, 74, 64, "mamba", *lines)
    d.text(215, 245, "one step of the recurrence for each token:")
    d.text(215, 263, "state = exp(Δ·A)·state + Δ·B·x,  y = C·state + D·x")
    d.text(215, 290, "memory does not grow with the length")


def _inside_experts(d: Drawing) -> None:
    """Draw the parts of an expert block in the lower right."""
    d.text(660, 130, "Expert block", "text", 14)
    d.box(460, 150, 60, 64, "moe", "norm")
    d.box(536, 150, 84, 64, "moe", "router", "Sinkhorn")
    d.arrow((520, 182), (535, 182))
    for number in range(4):
        y = 142 + 22 * number
        d.box(680, y, 90, 18, "moe")
        d.text(725, y + 13, ("expert 1", "expert 2", "…", "expert 8")[number], "text", 12)
        d.arrow((620, 182), (678, y + 9))
        d.arrow((770, y + 9), (818, 182))
    d.text(842, 186, "sum", "text", 13)
    d.text(660, 245, "each token goes to one expert (top_k) and is scaled by sigmoid(logit);")
    d.text(660, 263, "Sinkhorn gives every expert the same number of tokens in training")
    d.text(660, 290, "parallel.expert spreads the experts over processes")


def pictures() -> dict[Path, str]:
    """Return the content of every picture by its path."""
    return {FOLDER / f"architecture_{theme}.svg": draw(theme) for theme in THEMES}


if __name__ == "__main__":
    for path, content in pictures().items():
        path.write_text(content)
        print(path)
