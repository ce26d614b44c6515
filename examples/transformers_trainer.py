"""Fine-tune an export on a text file with transformers' Trainer.

Without options, it exports an untrained `tiny` and trains it on synthetic tokens. An export routes every token by
itself, also while it trains: nothing balances the experts. Use `blackmamba train` with `start.from` for long runs.

python examples/transformers_trainer.py --steps 20
python examples/transformers_trainer.py --export exports/mine --text more.txt --steps 200
"""

import argparse
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from megatron_blackmamba import batches, build, export_hf, load_config

BATCH = 8


def synthetic_texts(folder: str, steps: int) -> list[torch.Tensor]:
    """Export an untrained model to a folder, and return tokens that a pattern generates."""
    config = load_config("tiny", [f"training.global_batch={BATCH}"])
    print(export_hf(build(config), folder))  # an export of a trained run works the same way
    return [tokens_S for batch in islice(batches(config), steps) for tokens_S in batch["tokens"]]


def own_texts(folder: str, text: Path, length: int) -> list[torch.Tensor]:
    """Return the tokens of a text in pieces of equal length; the rest at the end is left out."""
    tokens = AutoTokenizer.from_pretrained(folder, trust_remote_code=True).encode(text.read_text(encoding="utf-8"))
    if len(tokens) < length:
        raise SystemExit(f"{text} has {len(tokens)} tokens, fewer than one piece of --length {length}")
    return list(torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--export", help="Folder that `blackmamba export hf` wrote, with its tokenizer.")
parser.add_argument("--text", type=Path, help="UTF-8 text to train on; needed with --export.")
parser.add_argument("--length", type=int, default=256, help="Tokens of each piece of the text (default 256).")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--out", default="runs/transformers_trainer", help="Folder for the result.")
options = parser.parse_args()
if bool(options.export) != bool(options.text):
    parser.error("--export and --text belong together")

folder = options.export or f"{options.out}/export"
if options.export:
    texts = own_texts(folder, options.text, options.length)
else:
    texts = synthetic_texts(folder, options.steps)
trainer = Trainer(
    model=AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32),
    args=TrainingArguments(
        output_dir=f"{options.out}/trainer",
        max_steps=options.steps,
        per_device_train_batch_size=BATCH,
        learning_rate=options.learning_rate,
        logging_steps=5,
        report_to=[],
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        remove_unused_columns=False,
    ),
    train_dataset=[{"input_ids": tokens_S, "labels": tokens_S} for tokens_S in texts],
    processing_class=AutoTokenizer.from_pretrained(folder, trust_remote_code=True) if options.export else None,
)
print(trainer.train())
trainer.save_model(f"{options.out}/model")
print(f"The trained model is in {options.out}/model.")
