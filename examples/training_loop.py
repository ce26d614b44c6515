"""Train BlackMamba with a loop of your own: plain PyTorch around `build` and `batches`.

python examples/training_loop.py --steps 50
"""

import argparse
from itertools import islice

import torch

from megatron_blackmamba import batches, build, load_config, save, update_routers

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--out", default="runs/training_loop", help="Folder for the trained weights.")
options = parser.parse_args()

config = load_config("tiny", ["model.pattern=MEME"])
model = build(config)
print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)

for step, batch in enumerate(islice(batches(config), options.steps), start=1):
    losses_BS = model(batch["tokens"], batch["labels"])
    loss = (losses_BS * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    update_routers(model)  # does nothing with the default router
    print(f"step {step}  loss {loss.item():.3f}")

save(model, options.out)
print(f"saved {options.out}: continue with blackmamba train tiny start.from={options.out}")
