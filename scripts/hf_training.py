"""Fine-tune an export for 20 steps with Trainer, TRL's SFTTrainer and PEFT, and import each result back.

    python scripts/hf_training.py            all three, on a tiny model
    python scripts/hf_training.py trainer    one of them: trainer, sft or peft

`make borders` runs it with several versions of transformers. It needs datasets, trl and peft.
"""

import atexit
import os
import shutil
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

atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)
STEPS, BATCH = 20, 4
SETTINGS = {"max_steps": STEPS, "per_device_train_batch_size": BATCH, "learning_rate": 1e-2, "logging_steps": 1}
SETTINGS |= {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
LORA_TARGETS = ["in_proj", "x_proj", "out_proj", "linear_fc1", "linear_fc2"]
EMBEDDING_TOO = ["word_embeddings", *LORA_TARGETS]  # is not merged: the output layer would change with it
TEXT = "so it is, they said, and a state is what a model keeps."


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


def tokens_of(folder):
    return AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]


def learn(trainer):
    """Train, and return what the losses were."""
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS, losses
    assert losses[-1] < 0.8 * losses[0], losses
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps"


def import_back(folder):
    """Import a folder as a checkpoint; the comparison runs both implementations."""
    return f"imported back: {convert.to_checkpoint(hf.read(folder), folder.with_name('checkpoint'))}"


def trainer_for(model, ids, work):
    data = [{"input_ids": ids, "labels": ids}] * (STEPS * BATCH)
    return Trainer(model, TrainingArguments(str(work / "log"), **SETTINGS), train_dataset=data)


def trainer(folder, work):
    yield from trained(trainer_for(load(folder), tokens_of(folder), work), work)


def sft(folder, work):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    data = Dataset.from_dict({"text": [TEXT] * (STEPS * BATCH)})
    arguments = SFTConfig(str(work / "log"), max_length=64, bf16=False, **SETTINGS)
    yield from trained(SFTTrainer(load(folder), args=arguments, train_dataset=data, processing_class=tokenizer), work)


def trained(trainer, work):
    yield learn(trainer)
    trainer.save_model(str(work / "trained"))
    yield import_back(work / "trained")


def peft(folder, work):
    from peft import LoraConfig, PeftModel, get_peft_model

    ids = tokens_of(folder)
    tokens = torch.tensor([ids])
    for targets in (LORA_TARGETS, "all-linear", EMBEDDING_TOO):
        name = targets if isinstance(targets, str) else "+".join(targets)
        place = work / name
        config = LoraConfig(r=8, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM")
        model = get_peft_model(load(folder), config)
        yield f"{name}: {learn(trainer_for(model, ids, place))}"
        model.eval().save_pretrained(place / "adapter")
        again = PeftModel.from_pretrained(load(folder), place / "adapter").eval()
        expected = model(tokens).logits
        assert torch.equal(again(tokens).logits, expected)
        if targets is EMBEDDING_TOO:
            yield "saved, reloaded"
            continue
        merged = again.merge_and_unload()
        torch.testing.assert_close(merged(tokens).logits, expected, atol=1e-4, rtol=1e-4)
        merged.save_pretrained(place / "merged")
        yield f"saved, reloaded, merged; {import_back(place / 'merged')}"
    for name in ("dt_proj", "conv1d"):
        try:
            get_peft_model(load(folder), LoraConfig(target_modules=[name], task_type="CAUSAL_LM"))
        except ValueError as error:
            yield f"{name}: refused: {str(error).splitlines()[0][:90]}"
        else:
            raise AssertionError(f"{name} was accepted")


def main(names):
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is tiny
    versions = [f"{name} {version(name)}" for name in ("transformers", "trl", "peft")]
    print(", ".join(versions))
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        hf.write(canonical(tiny(), tokenizer=write_tokenizer(work / "tokenizer.json")), work / "export")
        for name in names or ("trainer", "sft", "peft"):
            for line in {"trainer": trainer, "sft": sft, "peft": peft}[name](work / "export", work / name):
                print(f"{name}: {line}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
