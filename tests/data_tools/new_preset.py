"""A data preset of one entry: a corpus whose files are gzipped JSON lines with the text under "body"."""

from megatron_blackmamba.data_tools.sources import PRESETS, Preset

PRESETS["forum"] = Preset(format="jsonl", field="body", match="*.jsonl.gz")
