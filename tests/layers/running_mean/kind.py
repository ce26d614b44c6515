"""The mean of all tokens so far, between two projections, times a gain for each channel."""

from megatron_blackmamba.layers import Division, LayerKind, by_columns, by_rows


class RunningMean(LayerKind):
    letter, name = "A", "running mean"
    mixer = f"{__package__}.mixer:MeanMixer"
    cost = f"{__package__}.cost:MeanCost"
    decode = f"{__package__}.decode:MeanDecoding"
    modeling = f"{__package__}.exported:MeanMixer"
    part, entry = "mean", "mean"

    def divisions(self, model):
        return [Division("model.hidden_size", model.hidden_size, "tensor")]

    def weights(self, model):
        D = model.hidden_size
        return {"in_proj.weight": by_rows(D, x=D), "gain": by_rows(x=D), "out_proj.weight": by_columns(D, out=D)}

    def initial(self, name, shape, model, random):
        import torch

        return torch.ones(shape) if name == "gain" else None
