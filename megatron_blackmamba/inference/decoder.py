"""The network run as a recurrence: a prompt in parallel through the scan, then a token at a time, in constant memory.

Shapes: B batch, L prompt length, T = B * L tokens, D model, I inner, N state, W window, E experts, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.inference.linear import linear, threads_for_matrices_alone
from megatron_blackmamba.inference.weights import ExpertsLayer, MambaLayer, Weights
from megatron_blackmamba.ops import decoding
from megatron_blackmamba.ops.causal_conv1d import causal_conv1d, causal_conv1d_step
from megatron_blackmamba.ops.experts import grouped_experts
from megatron_blackmamba.ops.selective_scan import selective_scan, selective_scan_step


@dataclass
class State:
    """All that the model remembers of B sequences; its size does not depend on their length."""

    windows: list[Tensor]
    """For each Mamba layer the last inputs of its convolution, [B, W, I]."""
    states: list[Tensor]
    """For each Mamba layer the state of its recurrence, [B, I, N], fp32."""
    last_B: Tensor
    """The last token of each sequence, -1 before the first."""

    def rows(self, index: Tensor) -> "State":
        """The sequences at `index`, in that order; a sequence may come more than once."""
        return State([w[index] for w in self.windows], [s[index] for s in self.states], self.last_B[index])

    def copy_(self, other: "State") -> None:
        """Take over the values of `other`, in place."""
        for mine, its in zip(self._tensors(), other._tensors(), strict=True):
            mine.copy_(its)

    def _tensors(self) -> tuple[Tensor, ...]:
        return (*self.windows, *self.states, self.last_B)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())


class Decoder:
    """A model that reads and continues; the weights are shared by any number of states."""

    def __init__(self, weights: Weights):
        self.weights = weights
        self.config = weights.config
        self.threads: int | None = None
        self.gate: Callable[[Tensor], Tensor] = F.silu if weights.config.activation == "silu" else F.gelu
        self.compiled = [] if decoding.why_not(weights.embedding_VD, 1) else [self._compile(x) for x in weights.layers]

    def _compile(self, layer: MambaLayer | ExpertsLayer) -> decoding.Step:
        """The layer's step in C++."""
        if isinstance(layer, MambaLayer):
            return decoding.mamba_step(**vars(layer), eps=self.config.norm_eps)
        return decoding.experts_step(**vars(layer), activation=self.config.activation, eps=self.config.norm_eps)

    def start(self, batch: int) -> State:
        config, device = self.config, self.weights.device
        mamba = config.pattern.count("M")
        return State(
            [torch.zeros(batch, config.conv_kernel - 1, config.inner_size, device=device) for _ in range(mamba)],
            [torch.zeros(batch, config.inner_size, config.state_size, device=device) for _ in range(mamba)],
            torch.full((batch,), -1, dtype=torch.long, device=device),
        )

    @torch.inference_mode()
    def read(self, state: State, tokens_BL: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """Take in tokens in parallel, move `state` on in place, and return the logits after the last, `[B, V]` fp32.

        With `lengths_B` a row's tokens are its last so many; what is left of them is padding, and does nothing.
        """
        return self._logits(self._hidden(state, tokens_BL, lengths_B)[:, -1])

    @torch.inference_mode()
    def read_all(self, state: State, tokens_BL: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """As `read`, with the logits after every token, `[B, L, V]`."""
        return self._logits(self._hidden(state, tokens_BL, lengths_B).flatten(0, 1)).unflatten(0, tokens_BL.shape)

    @torch.inference_mode()
    def step(self, state: State, tokens_B: Tensor) -> Tensor:
        """One token of each sequence: `state` moves on in place; the logits after it, `[B, V]` fp32."""
        residual_BD = F.embedding(tokens_B, self.weights.embedding_VD).float()
        with threads_for_matrices_alone(residual_BD, self.weights.embedding_VD) as self.threads:
            self._restart(state)
            if decoding.why_not(self.weights.embedding_VD, len(tokens_B)) is None:
                self._layers_in_cpp(state, residual_BD)
            else:
                self._layers(state, residual_BD)
            state.last_B.copy_(tokens_B)
            return self._logits(self._final_norm(residual_BD))

    def _layers_in_cpp(self, state: State, residual_BD: Tensor) -> None:
        memories = zip(state.windows, state.states, strict=True)
        for layer, step in zip(self.weights.layers, self.compiled, strict=True):
            memory = next(memories) if isinstance(layer, MambaLayer) else ()
            step(residual_BD, *memory, threads=self.threads)

    def _layers(self, state: State, residual_BD: Tensor) -> None:
        memories = zip(state.windows, state.states, strict=True)
        for layer in self.weights.layers:
            x_BD = _rms_norm(residual_BD, layer.norm_D, self.config.norm_eps)
            if isinstance(layer, MambaLayer):
                residual_BD += self._mamba_step(layer, *next(memories), x_BD)
            else:
                residual_BD += self._experts_step(layer, x_BD)

    def _restart(self, state: State) -> None:
        if self.config.eod_reset is None:
            return
        going_on_B11 = state.last_B.ne(self.config.eod_reset)[:, None, None]
        if not going_on_B11.is_cuda and going_on_B11.all():
            return
        for tensor in (*state.windows, *state.states):
            tensor.mul_(going_on_B11)

    def _mamba_step(self, layer: MambaLayer, window_BWI: Tensor, state_BIN: Tensor, x_BD: Tensor) -> Tensor:
        x_BI, z_BI = self._times(x_BD, layer.in_proj).chunk(2, dim=-1)
        x_BI = causal_conv1d_step(window_BWI, x_BI, layer.conv_weight_IK, layer.conv_bias_I)
        dt_BR, B_BN, C_BN = self._dt_B_C(self._times(x_BI, layer.x_proj))
        y_BI = selective_scan_step(
            state_BIN,
            x_BI,
            self._times(dt_BR, layer.dt_proj_IR),
            layer.A_IN,
            B_BN,
            C_BN,
            layer.D_I,
            z_BI,
            layer.dt_bias_I,
        )
        return self._times(y_BI, layer.out_proj)

    def _experts_step(self, layer: ExpertsLayer, x_BD: Tensor) -> Tensor:
        best_B, choice_B = F.linear(x_BD, layer.router_ED, layer.router_bias_E).max(dim=-1)
        y_BD = self._gathered(layer, x_BD, choice_B) if x_BD.is_cuda else self._chosen(layer, x_BD, choice_B.tolist())
        return y_BD * torch.sigmoid(best_B)[:, None]

    def _gathered(self, layer: ExpertsLayer, x_BD: Tensor, choice_B: Tensor) -> Tensor:
        """As `_chosen`, without asking the device for the choice: a step that is captured must not wait."""
        x = x_BD.to(layer.fc1_EGD.dtype)
        if len(x) < self.config.experts:  # copy each row's expert
            x_B1D, fc1, fc2 = x[:, None], layer.fc1_EGD[choice_B], layer.fc2_EDF[choice_B]
        else:  # all experts for all rows read less than that
            x_B1D, fc1, fc2 = x.expand(self.config.experts, *x.shape), layer.fc1_EGD, layer.fc2_EDF
        gate, up = torch.bmm(x_B1D, fc1.mT).chunk(2, dim=-1)
        y = torch.bmm(self.gate(gate.float()).mul(up).to(x.dtype), fc2.mT).float()
        return y[:, 0] if len(x) < self.config.experts else y[choice_B, torch.arange(len(x), device=x.device)]

    def _chosen(self, layer: ExpertsLayer, x_BD: Tensor, choice_B: list[int]) -> Tensor:
        experts = sorted(set(choice_B))
        if len(experts) == 1:
            return self._expert(layer, x_BD, experts[0])
        y_BD = torch.empty_like(x_BD)
        for expert in experts:
            rows = [row for row, choice in enumerate(choice_B) if choice == expert]
            y_BD[rows] = self._expert(layer, x_BD[rows], expert)
        return y_BD

    def _expert(self, layer: ExpertsLayer, x_BD: Tensor, expert: int) -> Tensor:
        gate, up = self._times(x_BD, layer.fc1_EGD[expert]).chunk(2, dim=-1)
        return self._times(self.gate(gate) * up, layer.fc2_EDF[expert])

    def _hidden(self, state: State, tokens_BL: Tensor, lengths_B: Tensor | None) -> Tensor:
        weights = self.weights
        keep_BL1 = self._keep(tokens_BL, lengths_B)
        reset_BL = self._resets(state, tokens_BL)
        residual_BLD = F.embedding(tokens_BL, weights.embedding_VD).float()
        mamba = 0
        for layer in weights.layers:
            x_BLD = _rms_norm(residual_BLD, layer.norm_D, self.config.norm_eps).to(weights.dtype)
            if isinstance(layer, MambaLayer):
                residual_BLD += self._mamba(layer, state, mamba, x_BLD, keep_BL1, reset_BL)
                mamba += 1
            else:
                residual_BLD += self._experts(layer, x_BLD)
        state.last_B.copy_(tokens_BL[:, -1])
        return self._final_norm(residual_BLD)

    def _mamba(
        self,
        layer: MambaLayer,
        state: State,
        index: int,
        x_BLD: Tensor,
        keep_BL1: Tensor | None,
        reset_BL: Tensor | None,
    ) -> Tensor:
        x_BLI, z_BLI = F.linear(x_BLD, layer.in_proj).chunk(2, dim=-1)
        if keep_BL1 is not None:
            x_BLI = x_BLI * keep_BL1
        x_BLI, window = causal_conv1d(
            x_BLI,
            layer.conv_weight_IK,
            layer.conv_bias_I,
            initial_window=state.windows[index],
            reset_BL=reset_BL,
            return_final_window=True,
        )
        if keep_BL1 is not None:
            x_BLI = x_BLI * keep_BL1  # the convolution's bias alone must not feed the state at padding
        dt_BLR, B_BLN, C_BLN = self._dt_B_C(F.linear(x_BLI, layer.x_proj))
        y_BLI, last = selective_scan(
            x_BLI,
            F.linear(dt_BLR, layer.dt_proj_IR),
            layer.A_IN,
            B_BLN,
            C_BLN,
            layer.D_I,
            z_BLI=z_BLI,
            delta_bias_I=layer.dt_bias_I,
            initial_state_BIN=state.states[index],
            reset_BL=reset_BL,
            return_final_state=True,
        )
        state.windows[index].copy_(window)
        state.states[index].copy_(last)
        return F.linear(y_BLI, layer.out_proj)

    def _experts(self, layer: ExpertsLayer, x_BLD: Tensor) -> Tensor:
        x_TD = x_BLD.flatten(0, 1)
        best_T, choice_T = F.linear(x_TD.float(), layer.router_ED, layer.router_bias_E).max(dim=-1)
        y_TD = self._grouped(layer, x_TD, choice_T)
        return (y_TD * torch.sigmoid(best_T)[:, None]).view_as(x_BLD)

    def _grouped(self, layer: ExpertsLayer, x_TD: Tensor, choice_T: Tensor) -> Tensor:
        order_T = choice_T.argsort()
        tokens_E = (choice_T[:, None] == torch.arange(self.config.experts, device=choice_T.device)).sum(dim=0)
        y_TD = grouped_experts(
            x_TD[order_T].to(layer.fc1_EGD.dtype),
            tokens_E,
            layer.fc1_EGD,
            layer.fc2_EDF,
            activation=self.config.activation,
        )
        return torch.empty_like(x_TD, dtype=torch.float32).index_copy_(0, order_T, y_TD.float())

    def _times(self, x_BI: Tensor, weight_OI: Tensor) -> Tensor:
        return linear(x_BI, weight_OI, self.threads)

    def _dt_B_C(self, x: Tensor) -> tuple[Tensor, ...]:
        config = self.config
        return x.split([config.dt_rank_or_default, config.state_size, config.state_size], dim=-1)

    def _keep(self, tokens_BL: Tensor, lengths_B: Tensor | None) -> Tensor | None:
        L = tokens_BL.shape[1]
        if lengths_B is None or bool((lengths_B == L).all()):
            return None
        position_L = torch.arange(L, device=tokens_BL.device)
        return (position_L >= L - lengths_B[:, None])[:, :, None].to(self.weights.dtype)

    def _resets(self, state: State, tokens_BL: Tensor) -> Tensor | None:
        if self.config.eod_reset is None:
            return None
        return torch.cat((state.last_B[:, None], tokens_BL[:, :-1]), dim=1) == self.config.eod_reset

    def _final_norm(self, residual: Tensor) -> Tensor:
        weight, bias = self.weights.final_norm_D, self.weights.final_bias_D
        return F.layer_norm(residual, weight.shape, weight, bias, self.config.norm_eps)

    def _logits(self, hidden_TD: Tensor) -> Tensor:
        return self._times(hidden_TD, self.weights.embedding_VD)


def _rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight_D.shape, weight_D, eps)
