"""The files that say what a run is: written at its start, and again if a clean-up of old files removes them."""

from pathlib import Path

from megatron_blackmamba.config import RunConfig, to_yaml
from megatron_blackmamba.data import DataPlan
from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.mixture import Mixture
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.registry import extensions


def contents(folder: RunFolder, config: RunConfig, data: DataPlan, mixture: Mixture | None = None) -> dict[Path, bytes]:
    """Return the content of each: the config, the data and their tokenizer, and the mixture that a branch composed."""
    used = ",".join(extensions())
    needs = f"# trained with BLACKMAMBA_IMPORT={used}\n" if used else ""
    found = {
        folder.config: (needs + to_yaml(config)).encode(),
        folder.data_plan: atomic.json_bytes(data.describe()),
    }
    if mixture:
        found[folder.mixture] = mixture.to_yaml().encode()
    tokenizer = data.record["tokenizer"]
    if tokenizer and tokenizer["file"]:
        found[folder.tokenizer] = Path(tokenizer["file"]).read_bytes()
    return found
