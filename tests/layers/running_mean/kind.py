"""The mean of all tokens so far, between two projections, times a gain for each channel."""

from megatron_blackmamba.layers import LayerKind, by_columns, by_rows


class RunningMean(LayerKind):
    letter, name = "A", "running mean"
    part, entry = "mean", "mean"
    modeling = f"{__package__}.exported:MeanMixer"

    def weights(self, model):
        D = model.hidden_size
        return {"in_proj.weight": by_rows(D, x=D), "gain": by_rows(x=D), "out_proj.weight": by_columns(D, out=D)}

    def initial(self, name, shape, model, random):
        import torch

        return torch.ones(shape) if name == "gain" else None

    def state(self, model):
        return {"total": (model.hidden_size,), "count": (1,)}

    def between(self, x, gain, inputs, total, count):
        from .exported import mean

        y, total, count = mean(x, inputs.keep_BL1, inputs.reset_BS, total, count)
        return y * gain, total, count
