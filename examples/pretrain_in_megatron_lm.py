"""Train a model of this package in Megatron-LM's own loop, with its data, optimizer, schedule and checkpoints.

    PYTHONPATH=Megatron-LM torchrun --nproc-per-node 8 examples/pretrain_in_megatron_lm.py blackmamba_1.5b -- \
        --data-path … --micro-batch-size 6 --global-batch-size 336 --train-iters 1000 --lr 2e-4 --bf16

Before `--` stand a config of this package and overrides, which describe model and layout; after it Megatron-LM's own
arguments. docs/megatron_lm.md says what holds and what does not.
"""

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import megatron_blackmamba.model
from megatron_blackmamba.config import RunConfig, load
from megatron_blackmamba.engine import changes

changes.install()  # to megatron-core, before Megatron-LM imports it

import torch  # noqa: E402
from pretrain_gpt import get_batch, train_valid_test_datasets_provider  # noqa: E402
from torch import Tensor  # noqa: E402

from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.training import pretrain  # noqa: E402


def main(words: list[str]) -> None:
    """Split the command line, and hand the model to Megatron-LM."""
    middle = words.index("--")
    config = load(words[0], words[1:middle])
    sys.argv[1:] = words[middle + 1 :]
    train_valid_test_datasets_provider.is_distributed = True
    pretrain(
        train_valid_test_datasets_provider,
        partial(provide, config),
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults=told(config),
    )


def told(config: RunConfig) -> dict[str, Any]:
    """Return what Megatron-LM checks or counts of the model, and the layout, as its arguments' defaults."""
    model, parallel = config.model, config.parallel
    return {
        "num_layers": model.layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": parallel.tensor,
        "seq_length": config.data.sequence_length,
        "max_position_embeddings": config.data.sequence_length,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "num_experts": model.experts if parallel.expert > 1 else None,
    }


def provide(described: RunConfig, *_: Any, **__: Any) -> torch.nn.Module:
    """Return this rank's part of the model; Megatron-LM has laid the process groups."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = megatron_blackmamba.model.build(described, SimpleNamespace(groups=groups))  # type: ignore[arg-type]
    model.bfloat16 = lambda: model  # its weights have the precision that each needs
    return model


def forward_step(batches: Any, model: torch.nn.Module) -> tuple[Tensor, Any]:
    """Return the losses of a micro-batch, and the function that adds them up as Megatron-LM expects."""
    tokens_BS, labels_BS, mask_BS, *_ = get_batch(batches)
    return model(tokens_BS, labels_BS), partial(summed, mask_BS)


def summed(mask_BS: Tensor, losses_BS: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total = (losses_BS.float() * mask_BS).sum()
    count = mask_BS.sum().to(torch.int)
    return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}


if __name__ == "__main__":
    main(sys.argv[1:])
