"""Training in plain PyTorch and float64, token by token, from the description of a model alone.

It shares no code with the package: autograd, loops over tokens, and Adam written out. Weights have the package's names
with one process; experts are stacked, `[E, 2, F, D]` and `[E, D, F]`.

Shapes: B batch, S sequence, T = B * S tokens, V vocabulary, D model, I inner, N state, K taps, C channels of a head. In
Mamba-2 and 3: H heads of P channels in G groups.
"""

import math
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-5
WITHOUT_DECAY = ("_bias", ".bias", "norm.weight", "A_log", ".D", "mimo_x", "mimo_z", "mimo_o")
WITHOUT_DECAY += ("stream.scale", "output.scale", "router.carry", "router.norm")


@dataclass
class Recipe:
    """A model of `pattern`, and what is added to its loss."""

    pattern: str
    groups: int
    heads: int
    kv_heads: int
    router: str
    z_loss: float = 0.0
    router_z_loss: float = 0.0
    logit_softcap: float | None = None
    extra: str = ""
    """Letters of the extra depth."""
    extra_reads: str = "stream"
    extra_loss: float = 0.0
    rate: float = 3e-3
    decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    rotary_base: float = 10000.0
    embedding: float = 1.0
    residual: float = 1.0
    bias_rate: float = 1e-3
    top_k: int = 1
    aux_loss: float = 0.0
    scope: str = "tensor"
    """Of the softmax router's auxiliary loss."""
    expert_groups: tuple[int, int] = (1, 1)
    """Groups of experts, and how many of them a token chooses from."""
    balance: list[Tensor] = field(default_factory=list)
    """The auxiliary loss of each layer in this micro-batch."""
    counts: dict[str, list[list[int]]] = field(default_factory=dict)
    """By layer the choices of each micro-batch so far in this step."""
    attention: float | None = None
    logits: float = 1.0
    factors: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By the end of a weight's name, the factors of its learning rate and of its decay."""
    scores: list[tuple[int, float]] = field(default_factory=list)
    """Heads of the only attention layer with their largest scores, one a micro-batch."""


@dataclass
class Plain:
    """A run: its weights, and Adam's moments."""

    recipe: Recipe
    weights: dict[str, Tensor]
    moments: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    steps: int = 0
    biases: dict[str, "Balance"] = field(default_factory=dict)
    """Of the router `zaya`, by the start of the layer's names."""
    seen_extra: list[tuple[float, float]] = field(default_factory=list)
    """Of each micro-batch the sum of the extra depth's losses, and their number."""

    def step(self, micro_batches: list[dict[str, Tensor]]) -> tuple[float, float, dict[int, float]]:
        """Return the mean loss, and the mean squared log-sum of the logits and of each router, and update."""
        for weight in self.weights.values():
            weight.requires_grad_()
            weight.grad = None
        loss = squares = counted = 0.0
        of_routers: dict[int, list[float]] = {}
        for batch in micro_batches:
            mask_BS = batch["loss_mask"].double()
            self.recipe.balance.clear()
            logits_BSV, routers, stream_BSD = logits_of(self.weights, self.recipe, batch["tokens"], self.biases)
            log_sum_BS = logits_BSV.logsumexp(-1)
            losses_BS = log_sum_BS - logits_BSV.gather(-1, batch["labels"][..., None])[..., 0]
            total = ((losses_BS + self.recipe.z_loss * log_sum_BS**2) * mask_BS).mean()
            if self.recipe.extra:
                total = total + self.recipe.extra_loss * self._extra(stream_BSD, batch["labels"], mask_BS)
            total = total + sum(self.recipe.balance)  # of the extra depth too
            for layer, mean in routers.items():
                total = total + self.recipe.router_z_loss * mean
                of_routers.setdefault(layer, []).append(float(mean.detach()))
            (total / len(micro_batches)).backward()
            loss += float((losses_BS * mask_BS).detach().sum())
            squares += float((log_sum_BS**2 * mask_BS).detach().sum())
            counted += float(mask_BS.sum())
        self._update()
        self.recipe.counts.clear()
        for balance in self.biases.values():
            balance.move(self.recipe.bias_rate)
        return loss / counted, squares / counted, {layer: sum(x) / len(x) for layer, x in of_routers.items()}

    def _extra(self, stream_BSD: Tensor, labels_BS: Tensor, mask_BS: Tensor) -> Tensor:
        """Return the mean loss of the token after the next one; a sequence's last token has none and counts as 0."""
        w, recipe, name = self.weights, self.recipe, "extra_depth."
        stream_BSD = _last_norm(w, stream_BSD) if recipe.extra_reads == "norm" else stream_BSD
        embedding_VD = w["embedding.word_embeddings.weight"]
        embedded_BSD = _rms(recipe.embedding * embedding_VD[labels_BS], w[name + "embedding_norm.weight"])
        both_BSC = torch.cat([embedded_BSD, _rms(stream_BSD, w[name + "hidden_norm.weight"])], -1)
        x_BSD, routers = _layers(w, recipe, recipe.extra, name, both_BSC @ w[name + "proj.weight"].T, self.biases)
        x_BSD = _rms(x_BSD, w[name + "final_norm.weight"])[:, :-1]
        losses_BS = -torch.log_softmax(x_BSD @ embedding_VD.T / recipe.logits, -1)
        losses_BS = losses_BS.gather(-1, labels_BS[:, 1:, None])[..., 0] * mask_BS[:, 1:]
        self.seen_extra.append((float(losses_BS.detach().sum()), float(mask_BS[:, 1:].sum())))
        z_losses: Tensor = sum(recipe.router_z_loss * mean for mean in routers.values())  # type: ignore[assignment]
        return losses_BS.sum() / labels_BS.numel() + z_losses / recipe.extra_loss

    @torch.no_grad()
    def _update(self) -> None:
        self.steps += 1
        recipe = self.recipe
        gradients = {name: weight.grad for name, weight in self.weights.items()}
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        scale = min(1.0, recipe.clip / (norm + 1e-6))
        for name, weight in self.weights.items():
            faster, more = next((each for end, each in recipe.factors.items() if name.endswith(end)), (1.0, 1.0))
            recipe = replace(self.recipe, rate=self.recipe.rate * faster, decay=self.recipe.decay * more)
            if not name.endswith(WITHOUT_DECAY):
                weight -= recipe.rate * recipe.decay * weight
            weight -= recipe.rate * self._direction(name, gradients[name] * scale)

    def _direction(self, name: str, gradient: Tensor) -> Tensor:
        """Return the update of a weight at a learning rate of 1."""
        b1, b2 = self.recipe.betas
        first, second = self.moments.get(name, (torch.zeros_like(gradient), torch.zeros_like(gradient)))
        first, second = b1 * first + (1 - b1) * gradient, b2 * second + (1 - b2) * gradient**2
        self.moments[name] = first, second
        return (first / (1 - b1**self.steps)) / ((second / (1 - b2**self.steps)).sqrt() + 1e-8)


class Balance:
    """The bias of a `zaya` router and its Adam, which are fp32 in every precision."""

    def __init__(self, experts: int):
        self.bias, self.first, self.second = [0.0] * experts, [0.0] * experts, [0.0] * experts
        self.chosen: list[int] = []
        self.steps = 0

    def move(self, rate: float, b1: float = 0.9, b2: float = 0.95) -> None:
        def single(x: float) -> float:
            return float(torch.tensor(x, dtype=torch.float32))

        self.steps += 1
        for e in range(len(self.bias)):
            over = self.chosen.count(e) / len(self.chosen) - 1 / len(self.bias)
            self.first[e] = single(b1 * self.first[e] + (1 - b1) * over)
            self.second[e] = single(b2 * self.second[e] + (1 - b2) * over**2)
            size = math.sqrt(self.second[e] / (1 - b2**self.steps)) + 1e-8
            self.bias[e] = single(self.bias[e] - rate * self.first[e] / (1 - b1**self.steps) / size)
        self.chosen = []


def _layers(
    w: dict[str, Tensor],
    recipe: Recipe,
    pattern: str,
    prefix: str,
    x_BSD: Tensor,
    biases: dict[str, Balance],
) -> tuple[Tensor, dict[int, Tensor]]:
    routers, carried_TR = {}, torch.zeros(1, dtype=torch.float64)
    for i, letter in enumerate(pattern):
        start = f"{prefix}layers.{i}."
        m = {name.removeprefix(start + "mixer."): value for name, value in w.items() if name.startswith(start)}
        u_BSD = _rms(x_BSD, w[start + "norm.weight"])
        if letter == "M":
            y_BSD = _mamba(m, u_BSD)
        elif letter == "S":
            y_BSD = _mamba2(m, recipe, u_BSD)
        elif letter == "R":
            y_BSD = _mamba3(m, recipe, u_BSD)
        elif letter == "G":
            y_BSD = _delta(m, recipe, u_BSD)
        elif letter == "*":
            y_BSD = _attention(m, recipe, u_BSD)
        elif recipe.router == "zaya":
            y_BSD, routers[i], carried_TR = _carrying(m, u_BSD, carried_TR, biases, start)
        else:
            y_BSD, routers[i] = _experts(m, recipe, u_BSD, start)
        y_BSD = recipe.residual * y_BSD
        if start + "stream.scale" in w:
            x_BSD = (x_BSD + w[start + "stream.bias"]) * w[start + "stream.scale"]
            y_BSD = (y_BSD + w[start + "output.bias"]) * w[start + "output.scale"]
        x_BSD = x_BSD + y_BSD
    return x_BSD, routers


def logits_of(
    w: dict[str, Tensor], recipe: Recipe, tokens_BS: Tensor, biases: dict[str, Balance]
) -> tuple[Tensor, dict[int, Tensor], Tensor]:
    """Return the logits, of each router the mean squared log-sum of its logits, and the stream before the last norm."""
    embedding_VD = w["embedding.word_embeddings.weight"]
    x_BSD, routers = _layers(w, recipe, recipe.pattern, "decoder.", recipe.embedding * embedding_VD[tokens_BS], biases)
    logits_BSV = _last_norm(w, x_BSD) @ embedding_VD.T / recipe.logits
    cap = recipe.logit_softcap
    return (logits_BSV if cap is None else cap * torch.tanh(logits_BSV / cap)), routers, x_BSD


def _last_norm(w: dict[str, Tensor], x_BSD: Tensor) -> Tensor:
    mean = x_BSD.mean(-1, keepdim=True)
    variance = ((x_BSD - mean) ** 2).mean(-1, keepdim=True)
    x_BSD = (x_BSD - mean) / (variance + EPS).sqrt() * w["decoder.final_layernorm.weight"]
    return x_BSD + w["decoder.final_layernorm.bias"]


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / ((x**2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def _convolved(m: dict[str, Tensor], x_BSI: Tensor) -> Tensor:
    taps = m["conv1d.weight"][:, 0]
    past = [torch.zeros_like(x_BSI[:, 0])] * (taps.shape[1] - 1) + list(x_BSI.unbind(1))
    rows = [
        m.get("conv1d.bias", 0.0) + sum(taps[:, k] * past[t + k] for k in range(taps.shape[1]))
        for t in range(x_BSI.shape[1])
    ]
    y_BSI = torch.stack(rows, 1)
    return y_BSI * torch.sigmoid(y_BSI)


def _mamba(m: dict[str, Tensor], u_BSD: Tensor) -> Tensor:
    x_BSI, z_BSI = (u_BSD @ m["in_proj.weight"].T).chunk(2, -1)
    x_BSI = _convolved(m, x_BSI)
    A_IN = -m["A_log"].exp()
    N = A_IN.shape[1]
    low = x_BSI @ m["x_proj.weight"].T
    dt, B, C = low[..., : -2 * N], low[..., -2 * N : -N], low[..., -N:]
    if "dt_layernorm.weight" in m:
        dt, B, C = (_rms(part, m[f"{name}_layernorm.weight"]) for name, part in (("dt", dt), ("b", B), ("c", C)))
    delta_BSI = (1 + (dt @ m["dt_proj.weight"].T + m["dt_proj.bias"]).exp()).log()
    state, rows = 0.0, []
    for t in range(u_BSD.shape[1]):
        delta, x = delta_BSI[:, t, :, None], x_BSI[:, t]
        state = (delta * A_IN).exp() * state + delta * B[:, t, None] * x[..., None]
        rows.append((state * C[:, t, None]).sum(-1) + m["D"] * x)
    return (torch.stack(rows, 1) * z_BSI * torch.sigmoid(z_BSI)) @ m["out_proj.weight"].T


def _mamba2(m: dict[str, Tensor], recipe: Recipe, u_BSD: Tensor) -> Tensor:
    I, H, G = len(m["norm.weight"]), len(m["A_log"]), recipe.groups
    projected = u_BSD @ m["in_proj.weight"].T
    z_BSI, dt_BSH = projected[..., :I], projected[..., -H:]
    xBC = _convolved(m, projected[..., I:-H])
    N = (xBC.shape[-1] - I) // (2 * G)
    parts = xBC[..., I:].unflatten(-1, (2, G, N))
    B, C = parts[..., 0, :, :], parts[..., 1, :, :]
    if "b_layernorm.weight" in m:
        B, C = (_rms(x, m[f"{name}_layernorm.weight"].view(G, N)) for name, x in (("b", B), ("c", C)))
    x_BSHP = xBC[..., :I].unflatten(-1, (H, -1))
    dt_BSH = (1 + (dt_BSH + m["dt_bias"]).exp()).log()
    group = [h // (H // G) for h in range(H)]
    state, rows = 0.0, []
    for t in range(u_BSD.shape[1]):
        dt, x = dt_BSH[:, t, :, None, None], x_BSHP[:, t]
        decay = (-m["A_log"].exp()[:, None, None] * dt).exp()
        state = decay * state + dt * x[..., None] * B[:, t, group, None]
        rows.append((state * C[:, t, group, None]).sum(-1) + m["D"][:, None] * x)
    y_BSI = torch.stack(rows, 1).flatten(2) * z_BSI * torch.sigmoid(z_BSI)
    weight = m["norm.weight"].view(G, -1)
    return _rms(y_BSI.unflatten(-1, (G, -1)), weight).flatten(-2) @ m["out_proj.weight"].T


def _delta(m: dict[str, Tensor], recipe: Recipe, u_BSD: Tensor) -> Tensor:
    """The gates and decays follow from the sizes: those of GDN, KDA, and GDN-2 with erase gates up to 2."""
    H, V, G = len(m["A_log"]), len(m["norm.weight"]), recipe.groups
    I, Q, by_channel = H * V, len(m["conv1d.weight"]), "decay_proj.weight" in m
    K = (Q - I) // (2 * G)
    projected = u_BSD @ m["in_proj.weight"].T
    R = m["decay_proj.weight"].shape[1] if by_channel else H
    gates = projected[..., I + Q : -R]
    decay = projected[..., -R:] @ m["decay_proj.weight"].T if by_channel else projected[..., -R:]
    qkv = _convolved(m, projected[..., I : I + Q])
    group = [h // (H // G) for h in range(H)]
    q, k = (qkv[..., first : first + G * K].unflatten(-1, (G, K))[:, :, group] for first in (0, G * K))
    q, k = (x / ((x**2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    v = qkv[..., 2 * G * K :].unflatten(-1, (H, V))
    if gates.shape[-1] == H:
        erase = write = torch.sigmoid(gates)[..., None]
    else:
        erase = 2 * torch.sigmoid(gates[..., : H * K]).unflatten(-1, (H, K))
        write = torch.sigmoid(gates[..., H * K :]).unflatten(-1, (H, V))
    step = (1 + (decay + m["dt_bias"]).exp()).log().unflatten(-1, (H, -1))
    kept = (-m["A_log"].exp()[:, None] * step).exp()
    state, rows = torch.zeros(len(v), H, K, V, dtype=v.dtype), []
    for t in range(u_BSD.shape[1]):
        state = kept[:, t, :, :, None] * state
        found = ((erase[:, t] * k[:, t])[..., None] * state).sum(-2)
        state = state + k[:, t, :, :, None] * (write[:, t] * v[:, t] - found)[:, :, None]
        rows.append((q[:, t, :, :, None] * state).sum(-2) / math.sqrt(K))
    y = _rms(torch.stack(rows, 1), m["norm.weight"]).flatten(2)
    z_BSI = projected[..., :I]
    kimi = by_channel and gates.shape[-1] == H
    return (y * (1 if kimi else z_BSI) * torch.sigmoid(z_BSI)) @ m["out_proj.weight"].T


def _mamba3(m: dict[str, Tensor], recipe: Recipe, u_BSD: Tensor) -> Tensor:
    (H, R, N), I, G = m["B_bias"].shape, m["out_proj.weight"].shape[1], recipe.groups
    sizes = [I, I, R * G * N, R * G * N, H, H, H]
    projected = u_BSD @ m["in_proj.weight"].T
    z, x, B, C, dt, A, trap, angle = projected.split([*sizes, projected.shape[-1] - sum(sizes)], -1)
    B, C = (_rms(part.unflatten(-1, (R, G, N)), m[f"{name}_norm.weight"]) for name, part in (("B", B), ("C", C)))
    dt, decay = (1 + (dt + m["dt_bias"]).exp()).log(), torch.where(A > 0, 1 + A, 1 / (1 - A))
    rates = dt, -decay * dt, torch.sigmoid(trap), math.pi * torch.tanh(angle)[:, :, None]
    one = torch.ones(H, R, 1, dtype=x.dtype)
    given, z = (m["B_bias"], m["C_bias"], m["D"], m.get("mimo_x", one)), z.unflatten(-1, (H, -1))
    y, _ = mamba3_recurrence(x.unflatten(-1, (H, -1)), *rates, B, C, *given)
    total = torch.zeros_like(z)
    for r in range(R):
        out = _rms(y[:, :, r], m["norm.weight"].view(H, -1)) if "norm.weight" in m else y[:, :, r]
        gate = z * m.get("mimo_z", one)[:, r]
        total = total + out * gate * torch.sigmoid(gate) * m.get("mimo_o", one)[:, r]
    return total.flatten(2) @ m["out_proj.weight"].T


def mamba3_recurrence(
    x: Tensor, dt: Tensor, log_decay: Tensor, own: Tensor, angle: Tensor, B: Tensor, C: Tensor,
    B_bias: Tensor, C_bias: Tensor, D: Tensor, mix: Tensor,
    last: list[Tensor] | None = None, reset: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Return y `[B, S, R, H, P]` and what the last token leaves: angle, state, B and x.

    Shapes: x `[B, S, H, P]`, dt, log_decay and own `[B, S, H]`, angle `[B, S, 1 or H, angles]`,
    B and C `[B, S, R, G, N]`, their biases `[H, R, N]`, mix `[H, R, P or 1]`.
    """
    heads, ranks = x.shape[2], B.shape[2]
    group = [h // (heads // B.shape[3]) for h in range(heads)]
    if last is None:
        last = [x.new_zeros(len(x), heads, angle.shape[-1]), x.new_zeros(*x[:, 0].shape, B.shape[-1])]
        last += [x.new_zeros(len(x), heads, ranks, B.shape[-1]), x[:, 0] * 0]
    rows = []
    for t in range(x.shape[1]):
        if reset is not None:
            last = [part * (~reset[:, t]).view(-1, *[1] * (part.dim() - 1)) for part in last]
        summed = last[0] + angle[:, t] * dt[:, t, :, None]
        b, c = (
            [pairs_turned(V[:, t, r][:, group] + bias[:, r], summed) for r in range(ranks)]
            for V, bias in ((B, B_bias), (C, C_bias))
        )
        decay, lam, step = log_decay[:, t].exp()[..., None, None], own[:, t, :, None, None], dt[:, t, :, None, None]
        state = decay * last[1]
        for r in range(ranks):
            before = (last[3] * mix[:, r])[..., None] * last[2][:, :, r, None]
            now = (x[:, t] * mix[:, r])[..., None] * b[r][:, :, None]
            state = state + (1 - lam) * step * decay * before + lam * step * now
        rows.append([(state * c[r][:, :, None]).sum(-1) + D[:, None] * x[:, t] * mix[:, r] for r in range(ranks)])
        last = [summed, state, torch.stack(b, 2), x[:, t]]
    return torch.stack([torch.stack(row, 1) for row in rows], 1), last


def pairs_turned(x: Tensor, angle: Tensor) -> Tensor:
    parts = []
    for i in range(angle.shape[-1]):
        a, b, cos, sin = x[..., 2 * i], x[..., 2 * i + 1], angle[..., i].cos(), angle[..., i].sin()
        parts += [a * cos - b * sin, a * sin + b * cos]
    return torch.cat([torch.stack(parts, -1), x[..., len(parts) :]], -1)


def _attention(m: dict[str, Tensor], recipe: Recipe, u_BSD: Tensor) -> Tensor:
    B, S, D = u_BSD.shape
    each, C = recipe.heads // recipe.kv_heads, D // recipe.heads
    qkv = (u_BSD @ m["linear_qkv.weight"].T).view(B, S, recipe.kv_heads, each + 2, C)
    rates = 1.0 / recipe.rotary_base ** (torch.arange(0, C, 2).float() / C)  # fp32 in every precision
    angle_SC = torch.arange(S).float()[:, None] * rates
    found = []
    for head in range(recipe.heads):
        g = head // each
        q, k, v = qkv[:, :, g, head % each], qkv[:, :, g, each], qkv[:, :, g, each + 1]
        if "q_layernorm.weight" in m:
            q, k = _rms(q, m["q_layernorm.weight"]), _rms(k, m["k_layernorm.weight"])
        q, k = _turned(q, angle_SC), _turned(k, angle_SC)
        scores = (q @ k.transpose(1, 2)) * (recipe.attention or 1 / math.sqrt(C))
        scores = scores + torch.full((S, S), -torch.inf, dtype=torch.float64).triu(1)
        recipe.scores.append((head, float(scores.detach().max())))
        found.append(torch.softmax(scores, -1) @ v)
    return torch.cat(found, -1) @ m["linear_proj.weight"].T


def _turned(x: Tensor, angle: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    cos, sin = angle.cos().double(), angle.sin().double()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _experts(m: dict[str, Tensor], recipe: Recipe, u_BSD: Tensor, layer: str) -> tuple[Tensor, Tensor]:
    x_TD = u_BSD.flatten(0, 1)
    logits_TE = x_TD @ m["router.weight"].T + m["router.bias"]
    scores_TE, ranking_TE = torch.softmax(logits_TE, -1), logits_TE.detach()
    if recipe.router == "sinkhorn":
        scores_TE, plan = torch.sigmoid(logits_TE), (2 * logits_TE.detach()).exp()
        for axis in (0, 1, 0):
            plan = plan / plan.sum(axis, keepdim=True)
        ranking_TE = plan
    if recipe.aux_loss:
        recipe.balance.append(recipe.aux_loss * _unbalanced(recipe, scores_TE, u_BSD.shape[:2], layer))
    groups = [_allowed(scores_E, recipe) for scores_E in scores_TE.tolist()]
    experts = [best(row_E, recipe.top_k, among) for row_E, among in zip(ranking_TE.tolist(), groups, strict=True)]
    return _chosen(m, x_TD, scores_TE, experts).view_as(u_BSD), (logits_TE.logsumexp(-1) ** 2).mean()


def best(numbers: list[float], count: int, among: list[int]) -> list[int]:
    return sorted(among, key=lambda e: -numbers[e])[:count]


def _allowed(scores_E: list[float], recipe: Recipe) -> list[int]:
    """Return the experts of the groups of a token."""
    groups, chosen = recipe.expert_groups
    each = len(scores_E) // groups
    sums = [sum(sorted(scores_E[g * each : (g + 1) * each])[-(recipe.top_k // chosen) :]) for g in range(groups)]
    return [g * each + e for g in best(sums, chosen, list(range(groups))) for e in range(each)]


def _unbalanced(recipe: Recipe, scores_TE: Tensor, shape: torch.Size, layer: str) -> Tensor:
    """Return Switch's loss over a micro-batch, its sequences, or the micro-batches of a step so far."""
    (B, S), E = shape, scores_TE.shape[1]
    chosen = [best(scores_E, recipe.top_k, list(range(E))) for scores_E in scores_TE.tolist()]
    parts = [(chosen, scores_TE)]
    if recipe.scope == "sequence":
        parts = [(chosen[b * S : (b + 1) * S], scores_TE[b * S : (b + 1) * S]) for b in range(B)]
    if recipe.scope == "data":
        recipe.counts.setdefault(layer, []).extend(chosen)
        parts = [(recipe.counts[layer], scores_TE)]
    losses = []
    for choices, scores in parts:
        every = [e for of_token in choices for e in of_token]
        losses.append(E * sum(every.count(e) / len(every) * scores[:, e].mean() for e in range(E)))
    return sum(losses) / len(losses)  # type: ignore[return-value]


def _chosen(m: dict[str, Tensor], x_TD: Tensor, scores_TE: Tensor, experts: list[list[int]]) -> Tensor:
    rows, through = [], torch.eye(x_TD.shape[1], dtype=torch.float64)
    down, back = m.get("latent_down.weight", through), m.get("latent_up.weight", through)
    for x_D, scores_E, chosen in zip(x_TD, scores_TE, experts, strict=True):
        y_D = torch.zeros_like(x_D)
        for expert in chosen:
            gate, up = m["experts.fc1"][expert] @ (down @ x_D)
            y_D = y_D + scores_E[expert] * (back @ (m["experts.fc2"][expert] @ (F.silu(gate) * up)))
        rows.append(y_D)
    return torch.stack(rows)


def _carrying(
    m: dict[str, Tensor], u_BSD: Tensor, carried_TR: Tensor, biases: dict[str, Balance], layer: str
) -> tuple[Tensor, Tensor, Tensor]:
    """ZAYA1's router: return also what the next one reads."""
    x_TD, w = u_BSD.flatten(0, 1), {name.removeprefix("router."): value for name, value in m.items()}
    state_TR = x_TD @ w["down"].T + w["down_bias"] + w["carry"] * carried_TR
    hidden = _rms(state_TR, w["norm"])
    for name in ("first", "second"):
        hidden = hidden @ w[name].T + w[f"{name}_bias"]
        hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    logits_TE = hidden @ w["weight"].T + w["bias"]
    scores_TE = torch.softmax(logits_TE, -1)
    balance = biases.setdefault(layer, Balance(logits_TE.shape[1]))
    experts = (scores_TE.detach() + torch.tensor(balance.bias, dtype=torch.float64)).argmax(-1).tolist()
    balance.chosen += experts
    computed = [[e] if e < len(m["experts.fc1"]) else [] for e in experts]  # behind them may be one that skips
    return (
        _chosen(m, x_TD, scores_TE, computed).view_as(u_BSD),
        (logits_TE.logsumexp(-1) ** 2).mean(),
        state_TR,
    )
