"""Fine-tune an export for 20 steps with Trainer and TRL's SFTTrainer, and import each result back.

    python scripts/hf_training.py            both, on a tiny model
    python scripts/hf_training.py trainer    one of them: trainer or sft

`scripts/hf_versions.sh` runs it with several versions of transformers. It needs datasets and trl.
"""

import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="modeling_files_")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from megatron_blackmamba.interchange import convert, hf
from tests.reference import tiny
from tests.reference.canonical import canonical, write_tokenizer

STEPS, BATCH = 20, 4
SETTINGS = {"max_steps": STEPS, "per_device_train_batch_size": BATCH, "learning_rate": 1e-2, "logging_steps": 1}
SETTINGS |= {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
TEXT = "so it is, they said, and a state is what a model keeps."


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


def learns(trainer):
    """Train, and return what the losses were."""
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS, losses
    assert losses[-1] < 0.8 * losses[0], losses
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps"


def imports_back(folder, out):
    """Import a folder as a checkpoint; the comparison runs both implementations."""
    return f"imported back: {convert.to_checkpoint(hf.read(folder), out)}"


def trainer(folder, work):
    ids = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)(TEXT)["input_ids"]
    data = [{"input_ids": ids, "labels": ids}] * (STEPS * BATCH)
    arguments = TrainingArguments(str(work / "log"), **SETTINGS)
    trained = Trainer(load(folder), arguments, train_dataset=data)
    told = learns(trained)
    trained.save_model(str(work / "trained"))
    return told, imports_back(work / "trained", work / "checkpoint")


def sft(folder, work):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    data = Dataset.from_dict({"text": [TEXT] * (STEPS * BATCH)})
    arguments = SFTConfig(str(work / "log"), max_length=64, bf16=False, **SETTINGS)
    trained = SFTTrainer(load(folder), args=arguments, train_dataset=data, processing_class=tokenizer)
    told = learns(trained)
    trained.save_model(str(work / "trained"))
    return told, imports_back(work / "trained", work / "checkpoint")


def main(names):
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is tiny
    versions = [f"{name} {version(name)}" for name in ("transformers", "trl")]
    print(", ".join(versions))
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        hf.write(canonical(tiny(), tokenizer=write_tokenizer(work / "tokenizer.json")), work / "export")
        for name in names or ("trainer", "sft"):
            for line in {"trainer": trainer, "sft": sft}[name](work / "export", work / name):
                print(f"{name}: {line}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
