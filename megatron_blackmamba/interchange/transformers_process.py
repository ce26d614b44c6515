"""Load an export as its users do, in a process of its own: transformers, torch, and no code of ours but the folder's.

    python -m megatron_blackmamba.interchange.transformers_process FOLDER QUESTION ANSWER [own]

QUESTION is a safetensors file with `prompts`, token ids `[B, S]`, and `text`, bytes. ANSWER gets the prompts with what
the model wrote behind them, the logits of each step of writing, the logits and experts of one pass over all these
tokens, and the text's token ids. The last line of the output is JSON: the version of transformers, and any error.

own: Read the prompts only, with the class of transformers itself; code in the folder does not run.
"""

import json
import os
import sys
import traceback
from typing import Any

NEW_TOKENS = 8
"""Number of tokens that the model writes behind each prompt, with its cache."""


class NoClassError(Exception):
    """The installed transformers has no right class for a model, whatever its weights are."""


def answer(folder: str, question: str, destination: str, code: str = "the folder's") -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    asked = load_file(question)
    prompts, text = asked["prompts"], bytes(asked["text"].tolist()).decode()
    config = config_of(folder)
    own_code = "auto_map" in config and code != "own"
    kind = {"torch_dtype": torch.float32, "trust_remote_code": own_code}  # fp32 before anything is rounded
    model = AutoModelForCausalLM.from_pretrained(folder, **kind).float().eval()
    if not own_code:
        require_groups(model)
    if code == "own":
        with torch.inference_mode():
            save_file({"tokens": prompts, "logits": model(prompts).logits.float().contiguous()}, destination)
        return
    greedy = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    written = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=greedy)
    found = {"tokens": written.sequences, "steps": torch.stack(written.logits, dim=1).float()}
    with torch.inference_mode():
        output = model(found["tokens"], **({"output_router_choices": True} if own_code else {}))
    found["logits"] = output.logits.float()
    if own_code:
        found |= {f"choices.{i}": choice for i, choice in enumerate(output.router_choices or ())}
    if text:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=own_code)
        found["text"] = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, destination)


def require_groups(model: Any) -> None:
    """Refuse a Mamba-2 layer that normalises all groups of heads as one, as transformers did before 5.23."""
    groups = max(getattr(model.config, name, 1) for name in ("n_groups", "mamba_n_groups"))
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNormGated")]
    if groups > 1 and any(not hasattr(norm, "group_size") for norm in norms):
        raise NoClassError(f"{model.config.model_type} with {groups} groups, which it normalises as one")


def config_of(folder: str) -> dict[str, Any]:
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        config: dict[str, Any] = json.load(file)
    return config


def main() -> int:
    told: dict[str, str] = {}
    try:
        from transformers import __version__

        told["version"] = __version__
        if sys.argv[4:] == ["own"]:
            from transformers import CONFIG_MAPPING

            kind = config_of(sys.argv[1])["model_type"]
            if kind not in CONFIG_MAPPING:
                raise NoClassError(kind)
        answer(*sys.argv[1:])
    except NoClassError as error:
        told |= {"no_class": str(error), "error": str(error)}
    except Exception as error:  # any: it is the user's tool that fails
        traceback.print_exc()
        words = " ".join(str(error).split())
        told["error"] = f"{type(error).__name__}: {words}"
    print(json.dumps(told), flush=True)
    return 1 if "error" in told else 0


if __name__ == "__main__":
    raise SystemExit(main())
