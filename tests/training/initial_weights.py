"""Write the weights that a run begins with: `python -m tests.training.initial_weights FILE OVERRIDE...`."""

import json
import sys

import torch

from megatron_blackmamba import model
from megatron_blackmamba.config import load
from megatron_blackmamba.runtime import world


def main(file: str, overrides: list[str]) -> None:
    config = load("tiny", overrides)
    built = model.build(config, world.start(config.parallel))
    torch.save({name: value.detach() for name, value in built.named_parameters()}, file)
    world.shutdown()
    print(json.dumps({}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
