"""Fine-tune an export with transformers' Trainer.

An export routes every token by itself, also while it trains: nothing balances the experts. Use `blackmamba train` with
`start.from` for long runs.

python examples/transformers_trainer.py --steps 20
"""

import argparse
from itertools import islice

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from megatron_blackmamba import batches, build, export_hf, load_config

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--out", default="runs/transformers_trainer", help="Folder for the export and the result.")
options = parser.parse_args()

config = load_config("tiny", ["training.global_batch=8"])
print(export_hf(build(config), f"{options.out}/export"))  # an export of a trained run works the same way

model = AutoModelForCausalLM.from_pretrained(f"{options.out}/export", trust_remote_code=True, dtype=torch.float32)
texts = [
    {"input_ids": tokens_S, "labels": tokens_S}
    for batch in islice(batches(config), options.steps)
    for tokens_S in batch["tokens"]
]
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=f"{options.out}/trainer",
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=5,
        report_to=[],
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        remove_unused_columns=False,
    ),
    train_dataset=texts,
)
print(trainer.train())
trainer.save_model(f"{options.out}/model")
