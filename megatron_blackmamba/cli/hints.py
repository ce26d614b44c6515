"""Suggestions of the command line for a command or an option that does not exist."""

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_blackmamba.config import spellings

OTHER_COMMANDS = {
    "generate": "sample infer inference complete predict",
    "chat": "serve server api talk",
    "train": "pretrain resume continue finetune fine-tune fit",
    "anneal": "cooldown decay branch",
    "evaluate": "eval benchmark score",
    "export hf": "convert to_hf huggingface transformers safetensors",
    "export gguf": "llama.cpp llamacpp llama_cpp ollama",
    "export zyphra": "released original pytorch",
    "import hf": "huggingface transformers safetensors",
    "import zyphra": "released original pytorch",
    "new": "init create",
    "plan": "estimate params flops memory",
    "launch": "submit slurm sbatch",
    "runs": "list ls status",
    "report": "plot",
}
"""A command of ours, and what else people type for it."""
FILE_OPTIONS = ("config", "config_file", "config_path", "cfg", "yaml", "file")


def hint(arguments: Sequence[str], program: Any) -> str | None:
    """Return what was probably meant, if a command line names a command or an option that does not exist.

    program: the click command of the whole program.
    """
    command, rest = program, list(arguments)
    words: list[str] = []
    while hasattr(command, "commands"):
        if not rest or rest[0].startswith("-"):
            return None
        word = rest.pop(0)
        if word not in command.commands:
            return _command(word, command, words, program)
        words.append(word)
        command = command.commands[word]
    return _option(words, rest, command)


def _command(word: str, group: Any, words: list[str], program: Any) -> str | None:
    names = [] if getattr(group, "suggest_commands", False) else [*group.commands]  # or typer has suggested one
    found = (
        [
            ours
            for ours, others in OTHER_COMMANDS.items()
            if word in others.split() and (not words or ours.split()[:-1] == words)
        ]
        or [path for path in _paths(program) if path.split()[-1] == word]
        or [" ".join([*words, near]) for near in difflib.get_close_matches(word, names, n=1)]
    )
    return f"did you mean blackmamba {found[0]}?" if found else None


def _paths(group: Any, above: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        yield f"{above}{name}"
        if hasattr(command, "commands"):
            yield from _paths(command, f"{above}{name} ")


def _option(words: list[str], rest: list[str], command: Any) -> str | None:
    from megatron_blackmamba.config.load import key_of

    if not any(parameter.name == "configs" for parameter in command.params):
        return None
    known = {name for parameter in command.params for name in parameter.opts}
    for i, argument in enumerate(rest):
        option, _, value = argument.partition("=")
        if not option.startswith("--") or option in known:
            continue
        word = option.lstrip("-").replace("-", "_")
        if word in FILE_OPTIONS:
            file = value or next(iter(rest[i + 1 :]), "FILE")
            return f"{option} is no option. Give the file alone: blackmamba {' '.join(words)} {file}"
        if key := key_of(word):
            return f"{option} is no option. A config's key has no dashes: {key}=VALUE"
        if reason := spellings.not_a_key(word):
            return f"{option} is no option: {reason}"
    return None
