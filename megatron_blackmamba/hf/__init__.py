"""The modeling files that travel inside an export. They stand alone: transformers, torch, and our ops if installed."""
