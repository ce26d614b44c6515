"""The language model: embedding, stack, tied head, and the loss of each token.

Shapes: S sequence, B batch, D model, V vocabulary of this rank, L layers, E experts.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.layers import kinds_in
from megatron_blackmamba.layers.rows import Declared
from megatron_blackmamba.model.config import MegatronConfig
from megatron_blackmamba.model.inputs import LayerInputs
from megatron_blackmamba.model.linears import ColumnLinear
from megatron_blackmamba.model.mtp import ExtraDepth
from megatron_blackmamba.model.stack import Stack, scaled
from megatron_blackmamba.ops import head_loss
from megatron_blackmamba.ops.arguments import require_shape
from megatron_blackmamba.ops.attention import documents_of
from megatron_blackmamba.ops.context import several
from megatron_blackmamba.ops.cross_entropy import cross_entropy_and_log_sum, why_not
from megatron_blackmamba.ops.softcap import capped
from megatron_blackmamba.ops.split_loss import split_cross_entropy
from megatron_blackmamba.optimizers.base import EMBEDDING_OR_HEAD

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import ModelType


class LanguageModel(LanguageModule):
    """One pipeline stage of it; with one stage, all of it."""

    def __init__(self, config: MegatronConfig, sequence_length: int, pg_collection: ProcessGroupCollection):
        super().__init__(config=config, pg_collection=pg_collection)
        model = config.described
        self.sequence_length = sequence_length
        stage, stages = pg_collection.pp.rank(), pg_collection.pp.size()
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process, self.post_process = stage == 0, stage == stages - 1
        self.mtp_process = self.post_process and model.mtp.pattern is not None
        self.share_embeddings_and_output_weights = model.tie_embeddings
        if self.pre_process or self.mtp_process:
            self.embedding = LanguageModelEmbedding(
                config=config,
                vocab_size=model.vocab_size,
                max_sequence_length=sequence_length,
                position_embedding_type="none",
                tp_group=pg_collection.tp,
            )
        self.attends = any(kind.rotary for kind in kinds_in(model.pattern))
        self.rotary = (
            _rotary(config, pg_collection) if any(kind.rotates(model) for kind in kinds_in(model.pattern)) else None
        )
        self.decoder = Stack(config, self.pre_process, self.post_process, pg_collection)
        if self.mtp_process:
            self.extra_depth = ExtraDepth(config, pg_collection)
        if self.post_process:
            self.output_layer = ColumnLinear(
                model.hidden_size,
                model.vocab_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                skip_bias_add=False,
                gather_output=False,
                skip_weight_param_allocation=hasattr(self, "embedding") and model.tie_embeddings,
                tp_group=pg_collection.tp,
            )
        self.log_sums_BS: Tensor | None = None
        """With model.z_loss, the log-sums of the logits in the last forward pass of training, on the last stage."""
        self.mtp_losses_BS: Tensor | None = None
        """With model.mtp, the extra depth's losses in the last forward pass of training; the last column is void."""
        if self.pre_process or self.post_process:
            self.setup_embeddings_and_output_layer()
        if self.mtp_process:  # megatron-core 0.16 marks that of the first stage alone
            setattr(self.embedding.word_embeddings.weight, EMBEDDING_OR_HEAD, True)
        self.register_state_dict_post_hook(_without_nothing)

    def set_input_tensor(self, received: Tensor | list[Tensor]) -> None:
        """Set the output of the previous pipeline stage; megatron-core's schedules call this."""
        self.decoder.set_input_tensor(received[0] if isinstance(received, list) else received)

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor | None = None,
        before_B: Tensor | None = None,
        after_B: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream; on the last stage the loss of each token `[B, S]`, or logits `[B, S, V]`.

        In training, the gradient of a token's loss has that of its z-loss too, which the value leaves out.

        Args:
            before_B: The token before this rank's part of each sequence under `parallel.context`; -1 means none.
            after_B: The label after this part, which model.mtp predicts; -1 means none, and the last loss is void.
        """
        if torch.jit.is_tracing():
            raise ValueError("torch.jit.trace cannot record this model. Write it with export_hf, and use torch.export.")
        require_shape("the model", "labels", labels_BS, *tokens_BS.shape)
        for name, beside_B in (("before_B", before_B), ("after_B", after_B)):
            require_shape("the model", name, beside_B, len(tokens_BS))
        self._refuse_unknown_ids("tokens", tokens_BS)
        if labels_BS is not None:
            self._refuse_unknown_ids("labels", labels_BS)
        residual_SBD = self.embedded(tokens_BS) if self.pre_process else None
        x_SBD = self.decoder(residual_SBD, self._layer_inputs(tokens_BS, before_B))
        if not self.post_process:
            return x_SBD
        if labels_BS is None:
            return self.logits(x_SBD).transpose(0, 1)
        # In validation too: the call has a weight gathered that the head reads as well (model.tie_embeddings).
        ahead_SBD = self.embedded(labels_BS) if self.mtp_process else None
        model = self.config.described
        z_loss = model.z_loss if self.training else 0.0
        losses_BS, log_sums_BS = self._losses_of(x_SBD, labels_BS, z_loss)
        self.log_sums_BS = log_sums_BS if z_loss else None
        if ahead_SBD is not None and self.training:
            self.mtp_losses_BS = self._losses_of_next(tokens_BS, labels_BS, ahead_SBD, after_B)
        return losses_BS

    def _losses_of(self, x_SBD: Tensor, labels_BS: Tensor, z_loss: float) -> tuple[Tensor, Tensor | None]:
        """Return the loss of each token from normalised hidden states, and the log-sum of its logits."""
        weight = self._head_weight()
        if not self._head_computes_losses(x_SBD, weight):
            return self._losses(self.logits(x_SBD), labels_BS, z_loss)
        loss = {"z_loss": z_loss, "softcap": self.config.described.logit_softcap}
        both = self.output_layer(self._scaled(x_SBD), weight=weight, labels_T=labels_BS.t().flatten(), **loss)
        losses_BS, log_sums_BS = (each_T.view(labels_BS.t().shape).t() for each_T in both)
        return losses_BS, log_sums_BS

    def _losses_of_next(
        self, tokens_BS: Tensor, labels_BS: Tensor, embedded_SBD: Tensor, after_B: Tensor | None
    ) -> Tensor:
        """Return the losses of the extra depth: it reads the labels, and predicts the labels after them."""
        read_SBD = self.decoder.take_read_ahead()
        hidden_SBD = self.extra_depth(read_SBD, embedded_SBD, self._layer_inputs(labels_BS, tokens_BS[:, 0]))
        void_B = labels_BS[:, 0]
        next_B = void_B if after_B is None else torch.where(after_B < 0, void_B, after_B)
        return self._losses_of(hidden_SBD, shifted(labels_BS, next_B), z_loss=0.0)[0]

    def logits(self, x_SBD: Tensor) -> Tensor:
        """Return this rank's logits of normalised hidden states, `[S, B, V]`."""
        logits_SBV, _ = self.output_layer(self._scaled(x_SBD), weight=self._head_weight())
        return capped(logits_SBV, self.config.described.logit_softcap)

    def _scaled(self, x_SBD: Tensor) -> Tensor:
        """Return what the head reads: dividing its input costs less than dividing the logits."""
        return scaled(x_SBD, 1 / self.config.described.logits_divisor)

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """Return the weight of which megatron-core adds up the gradients of the first and the last stage."""
        if self.mtp_process:  # megatron-core 0.16 has no embedding there
            return self.embedding.word_embeddings.weight
        return super().shared_embedding_or_output_weight()

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        state: dict = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.mtp_process and not self.pre_process:  # a copy of the first stage's, which is the one to save
            copy = state[f"{prefix}embedding.word_embeddings.weight"]
            copy.replica_id = (1, *copy.replica_id[1:])
        return state

    def _head_weight(self) -> Tensor | None:
        return self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None

    def _refuse_unknown_ids(self, name: str, ids_BS: Tensor) -> None:
        """Refuse ids outside the vocabulary. GPUs are not asked: reading the result would stall each step."""
        if ids_BS.device.type != "cpu" or not ids_BS.numel():
            return
        vocabulary = self.config.described.vocab_size
        lowest, highest = (int(value) for value in ids_BS.aminmax())
        if highest >= vocabulary:
            raise ValueError(
                f"{name}: the largest id is {highest}, but model.vocab_size is {vocabulary}: ids are 0 to"
                f" {vocabulary - 1}. Use the tokenizer of this model."
            )
        if lowest < 0:
            advice = " -100 does not mask a label here: give any valid id, and leave its loss out of the mean."
            raise ValueError(f"{name}: id {lowest} is negative.{advice if name == 'labels' else ''}")

    def __deepcopy__(self, memo: dict[int, Any]) -> "LanguageModel":
        """Copy the weights with their marks; the copy uses the same process groups."""
        memo |= {id(shared): shared for shared in (self.pg_collection, *vars(self.pg_collection).values())}
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__ = deepcopy(self.__dict__, memo)
        for parameter, its in zip(self.parameters(), copied.parameters(), strict=True):
            marks = {name: mark for name, mark in vars(parameter).items() if isinstance(mark, (int, Declared))}
            vars(its).update(marks)
        return copied

    def embedded(self, tokens_BS: Tensor) -> Tensor:
        """Return the residual stream before the first layer."""
        if tokens_BS.dim() != 2:
            raise ValueError(f"tokens have the shape {tuple(tokens_BS.shape)}: the model reads [batch, sequence].")
        built, found = self.config.params_dtype, self.embedding.word_embeddings.weight.dtype
        if found != built:
            raise TypeError(
                f"the weights are {found}, and the model was built for {built}: .to(), .half() and .double() do not"
                " convert it. Build it with training.precision=bf16, fp32 or fp64."
            )
        embedded_SBD: Tensor = self.embedding(tokens_BS, position_ids=None)
        return scaled(embedded_SBD, self.config.described.multipliers.embedding)

    def _head_computes_losses(self, x_SBD: Tensor, weight_VD: Tensor | None) -> bool:
        """Return whether the head computes the losses itself, with the kernel for GPUs."""
        weight_VD = self.output_layer.weight if weight_VD is None else weight_VD
        return self.pg_collection.tp.size() == 1 and head_loss.applies(x_SBD, weight_VD)

    def _losses(self, logits_SBV: Tensor, labels_BS: Tensor, z_loss: float) -> tuple[Tensor, Tensor | None]:
        """Return the loss of each token, and the log-sum of its logits where a z-loss needs it."""
        group = self.pg_collection.tp
        if group.size() == 1 and not why_not(logits_SBV):
            both = cross_entropy_and_log_sum(logits_SBV.flatten(0, 1), labels_BS.t().flatten(), z_loss)
            losses_BS, log_sums_BS = (each_T.view(logits_SBV.shape[:2]).t() for each_T in both)
            return losses_BS, log_sums_BS
        if z_loss:
            loss_SB, log_sum_SB = split_cross_entropy(logits_SBV, labels_BS.t(), group, z_loss)
            return loss_SB.t(), log_sum_SB.t()
        return self.compute_language_model_loss(labels_BS, logits_SBV), None

    def take_expert_tokens(self) -> Tensor:
        """Return this rank's tokens per expert and layer of the whole model since the last call, `[L, E]`."""
        model = self.config.described
        device = next(self.parameters()).device
        rows = [torch.zeros(model.experts, dtype=torch.int64, device=device)] * model.layers
        counters = []
        for name, block in self.decoder.layers.named_children():
            router = getattr(block.mixer, "router", None)
            if router is not None:
                rows[int(name)] = router.tokens_E[: model.experts]  # behind them may be a choice that skips
                counters.append(router.tokens_E)
        tokens_LE = torch.stack(rows)
        if counters:
            torch._foreach_zero_(counters)
        return tokens_LE

    def _layer_inputs(self, tokens_BS: Tensor, before_B: Tensor | None = None) -> LayerInputs:
        eod = self.config.described.eod_reset
        reset_BS = None
        if eod is not None:
            reset_BS = torch.zeros_like(tokens_BS, dtype=torch.bool)
            reset_BS[:, 1:] = tokens_BS[:, :-1] == eod
            if before_B is not None:
                reset_BS[:, 0] = before_B == eod
        rotary, documents, context = None, None, self.pg_collection.cp
        if self.rotary is not None:  # parts of a sequence are contiguous: those of megatron-core's "packed" sequences
            L = tokens_BS.shape[1]
            rotary = self.rotary(L, offset=context.rank() * L, packed_seq=True)
        if self.attends and reset_BS is not None and not self.config.described.attention.across_documents:
            documents = documents_of(reset_BS, several(context))
        return LayerInputs(tokens_BS, reset_BS, rotary, documents)


def shifted(x_BS: Tensor, after_B: Tensor) -> Tensor:
    """Return what each place has behind it; `after_B` is behind the last."""
    return torch.cat([x_BS[:, 1:], after_B[:, None]], dim=1)


def _without_nothing(_: Any, state: dict[str, Any], *__: Any) -> None:
    """Leave out the extra state of megatron-core's linears, which is None: safetensors takes tensors alone."""
    for name in [name for name, value in state.items() if value is None]:
        del state[name]


def _rotary(config: MegatronConfig, groups: ProcessGroupCollection) -> RotaryEmbedding:
    return RotaryEmbedding(
        kv_channels=config.kv_channels,
        rotary_percent=1.0,
        rotary_base=config.described.attention.rotary_base,
        use_cpu_initialization=not torch.cuda.is_available(),
        cp_group=groups.cp,
    )
