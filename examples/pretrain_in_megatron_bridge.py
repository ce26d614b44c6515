"""Train a model of this package in Megatron-Bridge's own loop, with its data, optimizer, schedule and checkpoints.

    torchrun --nproc-per-node 1 examples/pretrain_in_megatron_bridge.py blackmamba_1.5b -- train.train_iters=1000

Before `--` stand a config of this package and overrides, which describe the model; after it overrides of
Megatron-Bridge's `ConfigContainer`. docs/megatron_lm.md says what holds and what does not.
"""

import os
import sys
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import megatron_blackmamba.model
from megatron_blackmamba.config import load
from megatron_blackmamba.engine import changes

changes.install()  # to megatron-core, before Megatron-Bridge imports it

import torch  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from torch import Tensor  # noqa: E402

from megatron.bridge.models.mamba.mamba_provider import MambaModelProvider  # noqa: E402
from megatron.bridge.training import config as bridge  # noqa: E402
from megatron.bridge.training.losses import masked_next_token_loss  # noqa: E402
from megatron.bridge.training.pretrain import pretrain  # noqa: E402
from megatron.bridge.training.utils.omegaconf_utils import (  # noqa: E402
    apply_overrides,
    create_omegaconf_dict_config,
    parse_hydra_overrides,
)


@dataclass
class Provider(MambaModelProvider):
    """A model of this package; the fields of its parent are what Megatron-Bridge checks or counts of it."""

    words: tuple[str, ...] = ()
    """A config of this package and overrides."""

    def provide(self, pre_process: Any = None, post_process: Any = None, vp_stage: Any = None) -> torch.nn.Module:
        """Return this rank's part of the model; Megatron-Bridge has laid the process groups."""
        config = load(self.words[0], list(self.words[1:]))
        model = megatron_blackmamba.model.build(config, SimpleNamespace(groups=self._pg_collection))  # type: ignore[arg-type]
        model.config.seq_length = self.seq_length
        model.bfloat16 = lambda: model  # its weights have the precision that each needs
        return model


def recipe(words: list[str]) -> bridge.ConfigContainer:
    """Return Megatron-Bridge's config for a config of this package: its model and batch, on mock data."""
    config = load(words[0], words[1:])
    model, length = config.model, config.data.sequence_length
    bf16, decay = config.training.precision == "bf16", config.optimizer.weight_decay
    provider = Provider(
        words=tuple(words),
        num_layers=model.layers,
        hidden_size=model.hidden_size,
        num_attention_heads=1,
        seq_length=length,
        vocab_size=model.vocab_size,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return bridge.ConfigContainer(
        model=provider,
        train=bridge.TrainingConfig(
            train_iters=100,
            micro_batch_size=config.training.micro_batch,
            global_batch_size=config.training.global_batch,
            eval_iters=0,
        ),
        optimizer=bridge.OptimizerConfig(lr=config.optimizer.learning_rate, min_lr=0.0, weight_decay=decay, bf16=bf16),
        scheduler=bridge.SchedulerConfig(start_weight_decay=decay, end_weight_decay=decay),
        dataset=bridge.GPTDatasetConfig(
            random_seed=1234,
            seq_length=length,
            blend=None,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            skip_getting_attention_mask_from_dataset=True,
            dataloader_type="single",
        ),
        logger=bridge.LoggerConfig(log_interval=1),
        tokenizer=bridge.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=model.vocab_size - 1),
        checkpoint=bridge.CheckpointConfig(),
    )


def forward_step(batches: Any, model: torch.nn.Module) -> tuple[Tensor, Any]:
    """Return the losses of a micro-batch, and the function that adds them up as Megatron-Bridge expects."""
    batch = next(batches)
    tokens_BS, labels_BS, mask_BS = (batch[name].cuda(non_blocking=True) for name in ("tokens", "labels", "loss_mask"))
    return model(tokens_BS, labels_BS).contiguous(), partial(masked_next_token_loss, mask_BS)


def main(words: list[str]) -> None:
    """Split the command line, and hand the model to Megatron-Bridge."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.exit("Use one process: two did not average their gradients in this loop, as docs/megatron_lm.md says.")
    middle = words.index("--")
    config = recipe(words[:middle])
    told, excluded = create_omegaconf_dict_config(config)
    told = parse_hydra_overrides(told, words[middle + 1 :])
    apply_overrides(config, OmegaConf.to_container(told, resolve=True), excluded)
    pretrain(config, forward_step)


if __name__ == "__main__":
    main(sys.argv[1:])
