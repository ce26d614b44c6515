"""Use the operations alone: selective scan, Sinkhorn routing and grouped experts on plain tensors.

python examples/ops.py
"""

import torch

from megatron_blackmamba import causal_conv1d, grouped_experts, load_imbalance, selective_scan, sinkhorn_choice

torch.manual_seed(0)
B, L, I, N, E, D, F = 2, 64, 32, 16, 8, 32, 64

# A Mamba mixer without its projections. Activations are (batch, length, channels); states and A are fp32.
x_BLI = torch.randn(B, L, I, requires_grad=True)
u_BLI = causal_conv1d(x_BLI, torch.randn(I, 4), torch.zeros(I))
A_IN = -torch.arange(1.0, N + 1).repeat(I, 1)
y_BLI, state_BIN = selective_scan(
    u_BLI,
    torch.rand(B, L, I),
    A_IN,
    torch.randn(B, L, N),
    torch.randn(B, L, N),
    torch.ones(I),
    z_BLI=torch.randn(B, L, I),
    return_final_state=True,
)
(gradient_BLI,) = torch.autograd.grad(y_BLI.square().mean(), x_BLI)
print(f"scan: output {tuple(y_BLI.shape)}, state {tuple(state_BIN.shape)}, gradient norm {gradient_BLI.norm():.3f}")

# A mixture of experts: the router prefers expert 0, and Sinkhorn balances the choice.
tokens_TD = torch.randn(B * L, D)
logits_TE = torch.randn(B * L, E) + torch.tensor([2.0] + [0.0] * (E - 1))
greedy_T, balanced_T = logits_TE.argmax(1), sinkhorn_choice(logits_TE)
print(f"largest expert load over the mean: argmax {load_imbalance(greedy_T, E):.2f},"
      f" Sinkhorn {load_imbalance(balanced_T, E):.2f}")  # fmt: skip

order_T = balanced_T.argsort()
tokens_per_expert_E = torch.bincount(balanced_T, minlength=E)
weights_T = logits_TE.sigmoid().gather(1, balanced_T[:, None])[:, 0]
sorted_TD = grouped_experts(
    tokens_TD[order_T], tokens_per_expert_E, torch.randn(E, 2 * F, D) / D, torch.randn(E, D, F) / F, weights_T[order_T]
)
output_TD = torch.empty_like(sorted_TD).index_copy(0, order_T, sorted_TD)
print(f"experts: output {tuple(output_TD.shape)}, tokens of each expert {tokens_per_expert_E.tolist()}")
