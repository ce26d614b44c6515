"""Own data parallelism in Python: `python -m tests.api_replicas FOLDER` prints what the ranks gave, as JSON."""

import json
import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from megatron_blackmamba import batches, build, export_hf, load_config, save, update_routers
from tests.runtime.ranks import fork_ranks

CONFIG = load_config(
    "tiny",
    ["model.router.kind=expert_bias", "model.router.bias_update_rate=0.01", "training.global_batch=4"],
)
STEPS = 3
PAGE = (Path(__file__).resolve().parents[1] / "docs/python.md").read_text()
BLOCK = re.search(r"^```py\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[1]  # type: ignore[index]


def trained(size: int, rank: int, folder: Path) -> dict[str, object]:
    """Train this rank's replica on its rows of each batch; return digests of its weights, and the largest bias."""
    model = build(CONFIG)
    wrapped = DistributedDataParallel(model) if size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _, batch in zip(range(STEPS), batches(CONFIG), strict=False):
        wrapped(batch["tokens"][rank::size], batch["labels"][rank::size]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        update_routers(wrapped)
    if rank == 0:
        save(model, folder / f"of_{size}")
        export_hf(model, folder / f"export_of_{size}")
    biases = [value for name, value in model.state_dict().items() if name.endswith("expert_bias")]
    sums = [parameter.double().sum().item() for parameter in model.parameters()]
    return {"sums": sums, "biases": torch.cat(biases).tolist()}


def replica(folder: Path) -> dict[str, object]:
    try:
        build(CONFIG)
    except ValueError as error:
        refused = str(error)
    dist.init_process_group("gloo")
    answer = trained(2, int(os.environ["RANK"]), folder)
    dist.barrier()
    dist.destroy_process_group()
    return {**answer, "refused": refused}


def of_the_page(folder: Path) -> None:
    """Run the script of docs/python.md. It makes a process group, and a port serves one group without a race."""
    os.chdir(folder)
    exec(BLOCK, {})


def main(folder: Path) -> dict[str, object]:
    ranks = fork_ranks(2, lambda: replica(folder), seconds=300)
    page = fork_ranks(2, lambda: of_the_page(folder), seconds=300)
    alone = fork_ranks(1, lambda: trained(1, 0, folder), seconds=300, alone=True)[0]
    return {"ranks": ranks, "page": page, "alone": alone}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
