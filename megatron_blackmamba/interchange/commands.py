"""The verbs `blackmamba export hf|gguf|zyphra` and `blackmamba import hf|zyphra`, as the command line has them."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from megatron_blackmamba.console.progress import Progress, State, working
from megatron_blackmamba.interchange import families

if TYPE_CHECKING:
    import torch

    from megatron_blackmamba.interchange.canonical import Canonical


class ExportGroup(typer.core.TyperGroup):
    """The group `export`; `export RUN OUT` is answered with the command that was probably meant."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and Path(args[0]).exists():
            raise typer.BadParameter(f"name the format first: blackmamba export hf {' '.join(args)}")
        return super().resolve_command(ctx, args)


export_app = typer.Typer(
    cls=ExportGroup,
    help="Export weights to Hugging Face, llama.cpp or the released format.",
    no_args_is_help=True,
)
import_app = typer.Typer(
    help="Import weights from Hugging Face or from the released BlackMamba format.", no_args_is_help=True
)


class Precision(str, Enum):
    bf16 = "bf16"
    fp32 = "fp32"


class GGUFType(str, Enum):
    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"
    q8_0 = "q8_0"


class Gate(str, Enum):
    silu = "silu"
    gelu = "gelu"


class Target(str, Enum):
    checkpoint = "checkpoint"
    hf = "hf"


class Checked(str, Enum):
    full = "full"
    short = "short"
    none = "none"


Out = Annotated[Path, typer.Argument(help="New output folder; it appears complete or not at all.")]
Checkpoint = Annotated[Path, typer.Argument(help="A checkpoint, or a run for its newest checkpoint.")]
Dtype = Annotated[Precision | None, typer.Option(help="Precision of the written weights.", show_default="unchanged")]
Verify = Annotated[bool, typer.Option("--verify/--no-verify", help="Compare weights and outputs with the source.")]
Check = Annotated[
    Checked, typer.Option(help="Load the whole export in transformers, its first layers of each kind, or nothing.")
]
TokenizerFile = Annotated[
    Path | None, typer.Option("--tokenizer", "-t", help="A tokenizer.json to store with the weights.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if an earlier conversion wrote it.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
License = Annotated[str, typer.Option(help="License of the weights, as the hub names it.")]
Averaged = Annotated[bool, typer.Option("--ema", help="Take a checkpoint's averaged weights (training.ema).")]


@export_app.command("hf")
@families.named
def export_hf(
    checkpoint: Checkpoint,
    out: Out,
    dtype: Dtype = None,
    shard_gb: Annotated[float, typer.Option(min=0.001, help="Maximum size of a safetensors file in GB.")] = 4.0,
    nproc: Annotated[int, typer.Option(min=1, help="Number of processes that write weights.")] = 1,
    every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Follow a run: export every N steps to OUT/step_N.")
    ] = None,
    ema: Averaged = False,
    tokenizer: TokenizerFile = None,
    license: License = "unknown",
    push_to: Annotated[str | None, typer.Option(metavar="OWNER/NAME", help="Upload to the Hugging Face hub.")] = None,
    private: Annotated[bool, typer.Option("--private/--public", help="Visibility of a new repository.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --push-to: list the uploads only.")] = False,
    native: Annotated[bool, typer.Option("--native", help="Write a model of transformers, without our code.")] = False,
    check: Check = Checked.full,
    overwrite: Overwrite = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", hidden=True, help="Old name of --check none.")] = False,
    as_json: Json = False,
) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained(OUT, trust_remote_code=True)` loads.

    With --native it is a {or_families}, and needs no such argument.
    Then another process loads it in that way, with the installed transformers. If that fails, the command fails.

    [dim]blackmamba export hf runs/blackmamba_1.5b exports/blackmamba_1.5b --dtype bf16[/dim]

    [dim]blackmamba export hf runs/tiny/checkpoints/step_00000100 exports/tiny_100[/dim]

    [dim]blackmamba export hf runs/blackmamba_2.8b exports/blackmamba_2.8b --check short[/dim]

    [dim]blackmamba export hf runs/blackmamba_1.5b exports/averaged --ema --dtype bf16[/dim]

    [dim]blackmamba export hf runs/mamba_343m exports/mamba_343m --native[/dim]

    [dim]blackmamba export hf runs/tiny exports/tiny --license apache-2.0 --push-to me/tiny --dry-run[/dim]

    [dim]blackmamba export hf runs/blackmamba_1.5b exports/beside --every 10000[/dim]
    """
    from megatron_blackmamba.interchange import convert, following, push
    from megatron_blackmamba.interchange.native import nearest

    how: dict[str, Any] = {"shard_bytes": int(shard_gb * 1e9), "processes": nproc, "as_native": native}
    how["overwrite"] = overwrite
    how["check"] = "none" if no_verify else check.value
    if every is not None:
        if push_to is not None or dry_run or overwrite:
            raise typer.BadParameter("--push-to, --dry-run and --overwrite are for one export. Leave out --every")

        def export(step: Path, target: Path, renew: Callable[[], None]) -> None:
            model = replace(_held(_opened(step, tokenizer, ema), native), license=license)
            _run(convert.to_hf, model, target, dtype, as_json, how, renew)

        following.export_every(checkpoint, out, every, export)
        return
    if dry_run and push_to is None:
        raise typer.BadParameter("--dry-run needs --push-to OWNER/NAME")
    if push_to is not None:
        push.check_name(push_to)
    model = replace(_held(_opened(checkpoint, tokenizer, ema), native), license=license)
    if not native and not (found := nearest(model.config))[1]:
        _say(
            f"note: {out} loads with trust_remote_code=True. --native writes a {found[0].model_type} of transformers,"
            " without code, for vLLM and llama.cpp"
        )
    uploads: dict[str, Any] = {} if push_to is None else {"push_to": push_to, "dry_run": dry_run}
    _run(convert.to_hf, model, out, dtype, as_json, how, said=uploads)
    if push_to is None:
        return
    for upload in push.uploads(out, push_to):
        _say(f"{upload.bytes:>13,} bytes  {out / upload.file} -> {upload.to}")
    if dry_run:
        _say(f"dry run: nothing was uploaded. Upload it with `hf upload {push_to} {out}`")
    else:
        _say(f"uploaded to {push.push(out, push_to, private)}")


@export_app.command("gguf")
@families.named
def export_gguf(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(help="New file; it appears complete or not at all.")],
    precision: Annotated[
        GGUFType, typer.Option("--type", help="Type of the large matrices; all others stay f32.")
    ] = GGUFType.bf16,
    ema: Averaged = False,
    tokenizer: TokenizerFile = None,
    license: License = "unknown",
    as_json: Json = False,
) -> None:
    """Write a GGUF file, which llama.cpp and Ollama load.

    The model must be a {or_families}, as for export hf --native.

    [dim]blackmamba export gguf runs/mamba_343m mamba_343m.gguf[/dim]

    [dim]blackmamba export gguf exports/mamba_343m mamba_343m.gguf --type q8_0[/dim]
    """
    from megatron_blackmamba.interchange import convert
    from megatron_blackmamba.interchange.native import llama_cpp

    model = replace(_held(_opened(checkpoint, tokenizer, ema)), license=license)
    warning = llama_cpp.vocabulary_of(model).warning
    if warning:
        _say(f"warning: {warning}")
    _run(
        convert.to_gguf,
        model,
        out,
        None,
        as_json,
        {"precision": precision.value},
        said={"warning": warning} if warning else {},
    )


@export_app.command("zyphra")
def export_zyphra(
    checkpoint: Checkpoint, out: Out, dtype: Dtype = None, verify: Verify = True, as_json: Json = False
) -> None:
    """Write config.json and pytorch_model.bin as the released BlackMamba inference code loads them.

    [dim]blackmamba export zyphra runs/blackmamba_1.5b exports/released[/dim]

    [dim]blackmamba export zyphra exports/blackmamba_1.5b exports/released --dtype bf16[/dim]
    """
    from megatron_blackmamba.interchange import convert, zyphra

    model = _held(_opened(checkpoint, None))
    zyphra.require_expressible(model.config, model.source)
    warning = zyphra.warning_about(model.config)
    if warning:
        _say(f"warning: {warning}")
    _run(
        convert.to_zyphra, model, out, dtype, as_json, {"verify": verify}, said={"warning": warning} if warning else {}
    )


@import_app.command("hf")
@families.named
def import_hf(
    source: Annotated[Path, typer.Argument(help="A model of transformers or state-spaces/mamba, or our export.")],
    out: Out,
    dtype: Dtype = None,
    tokenizer: TokenizerFile = None,
    config_only: Annotated[
        bool, typer.Option("--config-only", help="Write the model's config alone, to OUT, a YAML file.")
    ] = False,
    experts: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Upcycle: copy each dense MLP to N experts.")
    ] = None,
    top_k: Annotated[int, typer.Option(min=2, metavar="K", help="With --experts: number of experts per token.")] = 2,
    verify: Verify = True,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Convert a Hugging Face model to a checkpoint that training can start from, under any layout.

    It reads our exports, {and_families}, and the files of state-spaces/mamba.

    [dim]blackmamba import hf exports/blackmamba_1.5b checkpoints/start[/dim]

    [dim]blackmamba train my_run.yaml checkpoints/start/model.yaml start.from=checkpoints/start[/dim]

    [dim]blackmamba import hf mamba-130m-hf mamba.yaml --config-only[/dim]

    [dim]blackmamba import hf TinyLlama_v1.1 checkpoints/upcycled --experts 8[/dim]
    """
    from megatron_blackmamba.interchange import convert
    from megatron_blackmamba.interchange.canonical import tokenizer_of
    from megatron_blackmamba.interchange.hub import local_folder
    from megatron_blackmamba.interchange.open import chat_template, config_of_export, ends_of, open_export

    if config_only:
        if experts is not None:
            raise typer.BadParameter("--config-only does not upcycle. Leave out --experts")
        from megatron_blackmamba.config import model_to_yaml
        from megatron_blackmamba.formats import atomic

        if out.exists() and not overwrite:
            raise typer.BadParameter(f"{out}: already there. Name another file, or add --overwrite")
        atomic.write_text(out, model_to_yaml(config_of_export(source)))
        print(f"{out}: pass it behind a run's file, as in blackmamba plan RUN {out}")
        return
    source = local_folder(source)
    model = open_export(source)
    model = model if tokenizer is None else replace(model, tokenizer=tokenizer)
    if experts is not None:
        from megatron_blackmamba.interchange.upcycle import upcycled

        model = upcycled(model, experts, top_k)
    how = {"verify": verify, "original": source, "overwrite": overwrite}
    if template := chat_template(source):
        _say(f"note: {out} leaves out the chat template in {template}: copy it into exports of this model")
    if (kept := tokenizer_of(model)) and (others := sorted(ends_of(source) - {kept.eod_id})):
        ids = ", ".join(map(str, others))
        _say(f"note: {out} ends a text with id {kept.eod_id} only; {source} also with {ids}. Add them to exports")
    _run(convert.to_checkpoint, model, out, dtype, as_json, how)


@import_app.command("zyphra")
def import_zyphra(
    source: Annotated[
        Path,
        typer.Argument(help="Folder with config.json and weights, or the name of a downloaded hub model."),
    ],
    out: Out,
    to: Annotated[
        Target, typer.Option(help="A checkpoint to train from, or a Hugging Face folder.")
    ] = Target.checkpoint,
    activation: Annotated[
        Gate | None,
        typer.Option(
            help="Activation of the experts, which the files do not record.", show_default="gelu, with the reason"
        ),
    ] = None,
    dtype: Dtype = None,
    tokenizer: TokenizerFile = None,
    verify: Verify = True,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Convert the released BlackMamba files to a checkpoint, or directly to a Hugging Face folder.

    [dim]blackmamba import zyphra BlackMamba-2.8B exports/blackmamba_2.8b --to hf --tokenizer 20B_tokenizer.json[/dim]

    [dim]blackmamba import zyphra BlackMamba-1.5B checkpoints/released --activation silu[/dim]
    """
    from megatron_blackmamba.interchange import convert, zyphra
    from megatron_blackmamba.interchange.hub import local_folder

    source = local_folder(source)
    chosen = zyphra.choose_activation(source, activation.value if activation else None)
    _say(f"activation: {chosen.name} ({chosen.reason})")
    model = zyphra.read(source, chosen.name, tokenizer)
    conversion = convert.to_hf if to is Target.hf else convert.to_checkpoint
    how = {"check": "full" if verify else "none"} if to is Target.hf else {"verify": verify}
    _run(conversion, model, out, dtype, as_json, {**how, "overwrite": overwrite}, said={"activation": asdict(chosen)})


@export_app.command("refresh")
def export_refresh(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Hugging Face exports of any version.")],
    check: Check = Checked.full,
    as_json: Json = False,
) -> None:
    """Replace the code files of exports by this version's. Weights and all other files stay as they are.

    Then another process loads each folder with the installed transformers, as after `export hf`.

    [dim]blackmamba export refresh exports/blackmamba_1.5b exports/tiny[/dim]

    [dim]blackmamba export refresh exports/blackmamba_2.8b --check short[/dim]
    """
    from megatron_blackmamba.interchange import verification
    from megatron_blackmamba.interchange.hub import local_folder
    from megatron_blackmamba.interchange.refresh import refresh

    found = {}
    for folder in map(local_folder, folders):
        changes = refresh(folder)
        if not as_json:
            print(f"{folder}: " + ("; ".join(map(str, changes)) or "has this version's code already"))
        comparison = verification.verify(folder, check=check.value).comparison
        if not as_json:
            print(f"{folder}: {comparison}" if comparison else f"{folder}: not loaded (--check none)")
        found[str(folder)] = {
            "changes": [asdict(change) for change in changes],
            "parity": None if comparison is None else asdict(comparison),
        }
    if as_json:
        print(json.dumps(found, indent=2))


def verify(
    export: Annotated[Path, typer.Argument(help="A Hugging Face export, or released files.")],
    against: Annotated[
        Path | None, typer.Option(help="The source: a checkpoint, or a run for its newest checkpoint.")
    ] = None,
    ema: Averaged = False,
    check: Check = Checked.full,
    as_json: Json = False,
) -> None:
    """Compare an export with the checkpoint that it came from: every weight, and the outputs for the same tokens.

    The installed transformers loads the export and runs its code, in a process of its own. Without --against, its
    outputs are compared with those of our modules on the same weights. It notes code that is not this version's, and
    ids and settings of generation; it does not read README.md and other files.

    [dim]blackmamba verify exports/blackmamba_1.5b --against runs/blackmamba_1.5b/checkpoints/step_00010000[/dim]

    [dim]blackmamba verify exports/blackmamba_2.8b --check short[/dim]
    """
    if ema and against is None:
        raise typer.BadParameter("--ema is for the checkpoint of --against. Name it, or leave out --ema")
    with working("comparing weights and outputs"):
        from megatron_blackmamba.interchange import verification

        found = verification.verify(export, against, check.value, ema)
    if as_json:
        print(json.dumps(asdict(found), indent=2))
        return
    for note in found.notes:
        _say(f"note: {note}")
    print(f"{export}: the model of {found.source}: {found.comparison or 'equal weights (--check none)'}")


def average(
    folders: Annotated[
        list[Path], typer.Argument(metavar="CHECKPOINT... OUT", help="Checkpoints, runs or exports; then a new folder.")
    ],
    last: Annotated[int | None, typer.Option(min=2, metavar="N", help="The newest N checkpoints of one run.")] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="W,W,...", help="Weights of the checkpoints.", show_default="equal")
    ] = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Average the weights of several checkpoints into a new one, to score, export or start from.

    [dim]blackmamba average runs/tiny --last 3 checkpoints/averaged[/dim]

    [dim]blackmamba average runs/a/checkpoints/step_00001000 runs/b checkpoints/soup --weights 1,2[/dim]
    """
    from megatron_blackmamba.interchange import average, convert

    *sources, out = folders
    if last is not None and len(sources) == 1:
        sources = average.newest(sources[0], last)
    elif last is not None or len(sources) < 2:
        raise typer.BadParameter("give two or more checkpoints and the new folder; or --last N, one run and the folder")
    try:
        numbers = [float(number) for number in weights.split(",")] if weights else None
    except ValueError:
        raise typer.BadParameter(f"--weights {weights}: give numbers with commas between them") from None
    model = average.average([_opened(source, None) for source in sources], numbers)
    _run(convert.to_checkpoint, model, out, dtype, as_json, {}, said={"average_of": [*map(str, sources)]})


def torch_dtype(precision: Precision | None) -> "torch.dtype | None":
    import torch

    return {None: None, Precision.bf16: torch.bfloat16, Precision.fp32: torch.float32}[precision]


def _opened(path: Path, tokenizer: Path | None, ema: bool = False) -> "Canonical":
    with working(f"opening {path}"):
        from megatron_blackmamba.interchange.open import open_model

        return open_model(path, tokenizer, verify=True, ema=ema)


def _run(
    conversion: Callable[..., Any],
    model: "Canonical",
    out: Path,
    dtype: Precision | None,
    as_json: bool,
    how: dict[str, Any],
    renew: Callable[[], None] = lambda: None,
    said: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Convert a model as `how` says, and print what was done; JSON contains `said` too."""
    if model.tokenizer is None and conversion.__name__ != "to_zyphra":  # which has no place for one
        again = ". To repeat the command, add --overwrite" if "overwrite" in how else ""
        _say(f"{model.source} comes without a tokenizer, and so will {out}: name one with --tokenizer{again}")
    if model.unread:
        _say(f"note: {out} leaves out {len(model.unread)} tensors of {model.source}: {model.unread[0]} and the like")
    read = 0

    def watch(size: int) -> None:
        nonlocal read
        read += size
        renew()

    checks = how.get("check", "none") != "none" or how.get("verify", False)

    def state() -> State:
        if read < model.bytes:
            return State(read / model.bytes, f"of {model.bytes / 1e9:.3g} GB of weights")
        return State(0.0, "comparing with the source" if checks else "finishing the folder")

    if dtype is not None:
        how = {**how, "dtype": torch_dtype(dtype)}
    with Progress(state):
        comparison = conversion(model, out, watch=watch, **how)
    if as_json:
        parity = None if comparison is None else asdict(comparison)
        print(json.dumps({"out": str(out), "source": model.source, "parity": parity, **said}, indent=2))
        return
    print(f"{out}: {model.parameters:,} parameters from {model.source}")
    reason = ": nothing here reads the format" if conversion.__name__ == "to_gguf" else ""
    print(f"compared with the source: {comparison}" if comparison else f"not compared with the source{reason}")


def _held(model: Any, native: bool = False) -> Any:
    """Return the part of a model that an export holds, and say what it leaves out."""
    from megatron_blackmamba.interchange.canonical import main_depth
    from megatron_blackmamba.interchange.native import held

    part = held(model) if native else main_depth(model)
    if part is not model:
        _say(f"note: the export leaves out the extra depth model.mtp.pattern={model.config.mtp.pattern}")
    return part


def _say(text: str) -> None:
    print(text, file=sys.stderr)
