"""An export of a model is loaded by transformers, read in pieces, and imported again."""

import torch

from megatron_blackmamba.config import ParallelConfig
from megatron_blackmamba.interchange import convert, hf, megatron, through_hf, through_megatron
from megatron_blackmamba.model import build
from megatron_blackmamba.runtime import world

EOD, PADDING = 3, 2


def texts(rows, length):
    """Return random tokens, in which documents end."""
    tokens_BS = torch.randint(4, 64, (rows, length), generator=torch.Generator().manual_seed(1))
    tokens_BS[0, 4] = tokens_BS[-1, 6] = tokens_BS[-1, 9] = EOD
    return tokens_BS


def moved(config):
    """Return a model off its initial values, in which a gain of 1 or a bias of 0 could be forgotten."""
    random = torch.Generator().manual_seed(2)
    with world.fake(ParallelConfig(), world_size=1, where="cpu") as alone, torch.no_grad():
        model = build(config, alone)
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=random)
        return megatron.of_module(model)


def padded(tokens_BL):
    return torch.nn.functional.pad(tokens_BL, (PADDING, 0), value=5)


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def assert_loads_as_trained(config, folder):
    """Its first piece is padded, and its state passes through the cache.

    A process keeps the first code that it loads from folders of one name, so each export has a name of its own.
    """
    from transformers import AutoModelForCausalLM

    model, tokens_BL, export = moved(config), texts(2, 14), folder / folder.name
    trained = through_megatron.observe(model, tokens_BL).logits_BSV
    convert.to_hf(model, export, check="none")
    theirs = AutoModelForCausalLM.from_pretrained(export, trust_remote_code=True).float()
    mask_BL = (torch.arange(9) >= PADDING).long().expand(2, 9)
    with torch.no_grad():
        first = theirs(padded(tokens_BL)[:, :9], attention_mask=mask_BL, use_cache=True)
        cache = getattr(first, "cache", None) or first.past_key_values
        second = theirs(tokens_BL[:, 9 - PADDING :], past_key_values=cache)
    close(torch.cat((first.logits[:, PADDING:], second.logits), 1), trained)
    back = hf.read(export)
    assert hf.function_of(back.config) == hf.function_of(model.config)
    close(through_hf.observe(back, tokens_BL).logits_BSV, trained)
