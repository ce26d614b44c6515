"""From files and overrides to a RunConfig, with errors that name the key, the file and the nearest valid key.

A file may `include:` others by relative path; what comes later wins: included files, then the file itself, then the
next file, then `a.b=c` overrides.
"""

import difflib
import re
import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from megatron_blackmamba import layers, optimizers, routers
from megatron_blackmamba.config import checks, extensions, migrations, spellings
from megatron_blackmamba.formats import branches
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.settings import ConfigError, DataConfig, RunConfig, Section, UserPath, file_kinds
from megatron_blackmamba.settings.yaml_files import parse, read_yaml

OVERRIDE = "the command line"
PATH_KEYS = ("data.mixture", "start.from", "start.branch", "evaluation.data")
"""What a run reads beside its own folder."""


def config_folder() -> Path:
    """Return the folder of shipped configs: package data if installed, the repository's folder in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def shipped(kind: str = "run") -> list[str]:
    """Return the names of the shipped configs of one kind."""
    return sorted(path.stem for path in (config_folder() / kind).glob("*.yaml"))


def find(name: str | Path) -> Path:
    """Return the file for a path or a shipped name (`blackmamba_1.5b`, `model/tiny`, `configs/run/tiny.yaml`)."""
    path = Path(name)
    if path.is_file():
        return path
    folder = config_folder()
    tail = str(name).removeprefix("configs/").removesuffix(".yaml")
    candidates = [folder / f"{tail}.yaml", *(folder / kind / f"{tail}.yaml" for kind in ("run", "model", "data"))]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        if key := key_of(str(name).rstrip(":")):
            raise ConfigError(f"{name} is not a config file. To set the key, write {key}=VALUE without spaces.")
        if (path / "config.yaml").is_file():
            raise ConfigError(f"{name} is a run's folder: name the config in it, {path / 'config.yaml'}")
        is_path = path.suffix in (".yaml", ".yml") or (path.parent != Path() and path.name and not path.exists())
        near = [file for suffix in (".yaml", ".yml") if Path(file := f"{name}{suffix}").is_file()]
        near += _files_like(path)
        parts = [known for known in shipped() if Path(tail).name in known.split("_")]
        near += sorted(parts, key=lambda known: not known.startswith("quickstart"))
        near = near or difflib.get_close_matches(Path(tail).name, shipped(), n=1, cutoff=0.8 if is_path else 0.5)
        if is_path and not near:
            write = f"; `blackmamba new {path.stem}` writes one" if path.suffix else ""
            raise ConfigError(f"{name}: no such file (working folder: {Path.cwd()}){write}")
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigError(f"no config file {str(name)!r}{hint} Shipped runs: {', '.join(shipped())}.")
    return found


def _files_like(path: Path) -> list[str]:
    """Return YAML files beside a file that is missing whose name is nearly the same, such as mine.yaml for mine.yml."""
    beside = [file for file in sorted(path.parent.glob("*.y*ml")) if file.is_file()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.stem, {file.stem for file in beside}, n=1, cutoff=0.7)
    return [str(file) for file in beside if file.stem in close]


def keys() -> list[str]:
    """Return all keys that a run can set, as `a.b`."""
    return [path for path, _, inner in _of_a_run() if inner is None]


def key_of(word: str) -> str | None:
    """Return the key that a word names, as we or other projects call it, or by its last part.

    Of several keys that end in the word, the one in the highest section counts.
    """
    key, known = spellings.our_name(word) or word, {*keys(), *spellings.OTHER_NAMES}
    ends = [each for each in known if each.rpartition(".")[2] == word.replace("-", "_")]
    depth = min((end.count(".") for end in ends), default=0)
    highest = [end for end in ends if end.count(".") == depth]
    return key if key in known else highest[0] if len(highest) == 1 else None


def _warn(note: str) -> None:
    warnings.warn(note, FutureWarning, stacklevel=2)


def load(
    files: str | Path | Sequence[str | Path],
    overrides: Iterable[str] = (),
    note: Callable[[str], None] = _warn,
    to_train: bool = False,
) -> RunConfig:
    """Compose a run from files (later ones win) and `a.b=c` overrides.

    note: takes a line about each key that has another name now, or a moved run; by default it warns.
    to_train: refuse the config in the folder of a run that was moved, since it trains in the folder it had before.
    """
    if isinstance(overrides, (str, Mapping)):
        raise ConfigError(f"overrides={overrides!r}: give a list such as ['model.experts=4', 'training.steps=10'].")
    names = [files] if isinstance(files, (str, Path)) else list(files)
    if not names:
        raise ConfigError(f"name a config file or a shipped run: {', '.join(shipped())}")
    merged, origin = merge_files(names, note)
    overrides = list(overrides)
    if "data.kind=synthetic" in overrides and any(override.startswith("data.mixture=") for override in overrides):
        raise ConfigError(f"{OVERRIDE}: data.kind=synthetic reads no mixture: leave out one of the two")
    fields = {path: field.annotation for path, field, _ in _of_a_run()}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"an override has the form a.b=value; {override!r} does not")
        content = _nested(key.split("."), _typed(parse(value), value, fields.get(key)))
        migrations.accept_old_names(content, OVERRIDE, note)
        _resolve_shipped(content)
        spellings.accept(content)
        _merge(content, merged, origin, OVERRIDE, "")
    spellings.steps_as_tokens(merged, origin, DataConfig.model_fields["sequence_length"].default)
    for sort in (layers, routers, optimizers):
        sort.check_keys(keys())
    _refuse_unknown_keys(merged, origin)
    try:
        run = RunConfig.model_validate(merged)
    except ValidationError as error:
        if all(problem["type"] == "missing" for problem in error.errors()):
            _require_sections(merged, names)
        raise ConfigError(explain(error, origin)) from None
    run = known(run, origin)
    _refuse_unknown_names(run.resume.allow, _where("resume.allow", origin))
    if moved := _moved(run, origin):
        if to_train:
            raise ConfigError(moved)
        note(moved)
    return run


def _moved(run: RunConfig, origin: Mapping[str, str]) -> str | None:
    """Return what is wrong if the name comes from a file in a run's folder that trains in another one."""
    file = Path(origin.get("name", OVERRIDE))
    if origin.get("folder", str(file)) != str(file):
        return None
    holder = next((folder for folder in file.parents[:3] if _holds_run(folder)), None)
    trains_in = Path(run.folder).resolve() / run.name
    if holder is None or holder == trains_in.resolve():
        return None
    return (
        f"{file} belongs to the run in {holder}, but trains in {trains_in}. Was the run moved, copied or started in"
        f" another directory? To continue it here, add {shlex.quote(f'name={holder.name}')}"
        f" {shlex.quote(f'folder={holder.parent}')}; to start another run, name=OTHER."
    )


def _holds_run(folder: Path) -> bool:
    run = RunFolder(folder)
    return run.config.is_file() and (run.latest.is_file() or run.metrics.is_file())


def unread(run: RunConfig, overrides: Iterable[str]) -> Iterator[str]:
    """Yield a note on each override that this run does not read. Files may set keys for several patterns."""
    useless = {f"model.{key}": readers for key, readers in layers.unread_keys(run.model.pattern).items()}
    for override in overrides:
        key = override.partition("=")[0]
        found = next((readers for start, readers in useless.items() if f"{key}.".startswith(f"{start}.")), None)
        if found is not None:
            yield f"{override} has no effect: only {found} read it, and model.pattern={run.model.pattern} has none."
        elif key == "training.bucket_size" and not run.training.overlap:
            yield f"{override} has no effect: training.overlap=false does not read it."


def merge_files(
    files: Iterable[str | Path], note: Callable[[str], None] = _warn
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the content of config files and their includes, and the file that set each key, by the key's full name."""
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name in files:
        _merge_file(find(name), merged, origin, (), note)
    return merged, origin


def _merge_file(path: Path, merged: dict, origin: dict, above: tuple[Path, ...], note: Callable[[str], None]) -> None:
    path = path.resolve()
    if path in above:
        raise ConfigError("circular include: " + " → ".join(str(p) for p in (*above, path)))
    content = read_yaml(path)
    file_kinds.refuse_other_kind(content, path, "run")
    content = _up_to_date(content, path, note)
    includes = content.pop("include", [])
    for include in includes if isinstance(includes, list) else [includes]:
        if not isinstance(include, str):
            raise ConfigError(
                f"{path}: include={include!r} is not a file. Write include: base.yaml or a list of files."
            )
        _merge_file(_included(path, include), merged, origin, (*above, path), note)
    resolve_paths(content, path.parent)
    _resolve_shipped(content)
    spellings.accept(content)
    _merge(content, merged, origin, str(path), "")


def _included(path: Path, include: str) -> Path:
    """Return an included file: a path relative to the including file, else a shipped run."""
    target, known = path.parent / include, config_folder() / "run" / f"{include}.yaml"
    if not target.is_file() and include in shipped():
        return known
    if not target.is_file():
        near = difflib.get_close_matches(include, shipped(), n=1, cutoff=0.5)
        hint = f"; did you mean the shipped {near[0]!r}?" if near else f". Shipped runs: {', '.join(shipped())}."
        raise ConfigError(f"{path}: include: {include}: no such file ({target}){hint}")
    return target


def _up_to_date(content: dict[str, Any], path: Path, note: Callable[[str], None]) -> dict[str, Any]:
    """Migrate a file saved by a run, which has a version; a file written by hand may use old key names."""
    if migrations.VERSION_KEY in content:
        return migrations.migrate(content, str(path))
    try:
        migrations.accept_old_names(content, str(path), note)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return content


def _typed(parsed: Any, text: str, annotation: Any) -> Any:
    """Return the text itself where the field is a text and YAML reads a number, a list or the like (name=12:30)."""
    optional = annotation in (str | None, UserPath | None)
    if isinstance(parsed, str) or not (annotation is str or optional) or (parsed is None and optional):
        return parsed
    return text


def _nested(keys: list[str], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    return value


def resolve_paths(content: dict, folder: Path) -> None:
    """Make the paths of what a run reads absolute, in place, if they are there; `folder`: what they are relative to."""
    for key in PATH_KEYS:
        section, last = _holder(content, key)
        value = section.get(last)
        if isinstance(value, str):
            section[last] = branches.absolute(value, folder)


def _resolve_shipped(content: dict) -> None:
    """Replace the name of a shipped mixture by its file, unless a file here has that name."""
    section, last = _holder(content, "data.mixture")
    value = section.get(last)
    if isinstance(value, str) and value in shipped("data") and not Path(value).exists():
        section[last] = str(find(f"data/{value}").resolve())


def _holder(content: dict, key: str) -> tuple[dict, str]:
    """Return the section that holds a key, or an empty one, and the key's last part."""
    *sections, last = key.split(".")
    for section in sections:
        content = content.get(section) or {}
        if not isinstance(content, dict):
            return {}, last
    return content, last


def _merge(new: dict, into: dict, origin: dict, source: str, prefix: str) -> None:
    for key, value in new.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            if not isinstance(into.get(key), dict):
                into[key] = {}
            _merge(value, into[key], origin, source, f"{path}.")
        else:
            into[key] = value
        origin.pop(path, None)  # so that `origin` lists the keys in the order in which they were last set
        origin[path] = source


def section_of(annotation: Any) -> type[Section] | None:
    """Return the section that a field holds, if it is one; a list of sections is a value."""
    if get_origin(annotation) is list:
        return None
    types = [annotation, *get_args(annotation)]
    return next((kind for kind in types if isinstance(kind, type) and issubclass(kind, Section)), None)


def walk(section: type[Section] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo, type[Section] | None]]:
    """Yield the full name of every key, its field, and its section if it is one; a section before the keys in it."""
    for name, field in _fields(section).items():
        path, inner = f"{prefix}{name}", section_of(field.annotation)
        yield path, field, inner
        if inner is not None:
            yield from walk(inner, f"{path}.")


@cache
def _of_a_run() -> tuple[tuple[str, FieldInfo, type[Section] | None], ...]:
    return tuple(walk())


def unknown_key(content: dict, section: type[Section] = RunConfig, prefix: str = "") -> str | None:
    """Return the first key, as `a.b`, that no run has."""
    fields = _fields(section)
    for key, value in content.items():
        if key not in fields:
            return f"{prefix}{key}"
        inner = section_of(fields[key].annotation)
        if inner is not None and isinstance(value, dict):
            found = unknown_key(value, inner, f"{prefix}{key}.")
            if found is not None:
                return found
    return None


def _require_sections(content: dict, files: Sequence[str | Path]) -> None:
    """Refuse a run without the sections that have no default."""
    missing = [name for name, field in RunConfig.model_fields.items() if field.is_required() and name not in content]
    if missing:
        found = "is empty" if not content and len(files) == 1 else f"has no {' and no '.join(missing)} section"
        raise ConfigError(
            f"{' with '.join(map(str, files))}: {found}. Begin it with a run to change, such as `include: tiny`, or "
            "write a whole one with `blackmamba new NAME`. "
            f"Shipped runs: {', '.join(shipped())}."
        )


def _refuse_unknown_keys(content: dict, origin: dict) -> None:
    path = unknown_key(content)
    if path is None:
        return
    *sections, _ = path.split(".")
    section: type[Section] = RunConfig
    for name in sections:
        section = section_of(_fields(section)[name].annotation) or section
    prefix = "".join(f"{name}." for name in sections)
    raise ConfigError(f"{_where(path, origin)}: unknown key {path!r}; {_nearest(path, _fields(section), prefix)}")


def _fields(section: type[Section]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in section.model_fields.items()}


def _refuse_unknown_names(allowed: Iterable[str], where: str) -> None:
    """Refuse names of resume.allow that are neither a key nor a section: they would allow nothing."""
    known = {*(path for path, _, _ in walk()), *migrations.RENAMED}
    for section, its in extensions.sections():
        known |= {section, *(path for path, _, _ in walk(its, f"{section}."))}
    for name in allowed:
        if name not in known:
            raise ConfigError(f"{where}: resume.allow={name}: unknown key; {_nearest(name, _fields(RunConfig), '')}")


def _nearest(path: str, fields: dict, prefix: str) -> str:
    last = path.rpartition(".")[2]
    ours = spellings.our_name(path)
    if reason := spellings.not_a_key(path):
        return reason
    if ours is not None:
        meaning = spellings.meaning(path)
        return f"did you mean {ours!r}?{f' ({meaning})' if meaning else ''}"
    initials = [name for name in fields if last == "".join(word[0] for word in name.split("_"))]
    names = [*fields, *(["steps"] if prefix == "training." else [])]
    here = initials or difflib.get_close_matches(last, names, n=1, cutoff=0.6)
    if here:
        return f"did you mean {prefix + here[0]!r}?"
    everywhere = [*(path for path, _, _ in walk()), "training.steps"]
    alike = difflib.get_close_matches(last, [known.rpartition(".")[2] for known in everywhere], n=1, cutoff=0.75)
    same_name = [known for known in everywhere if known.rpartition(".")[2] in alike]
    near = same_name or difflib.get_close_matches(path, everywhere, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"{prefix.rstrip('.') or 'a run'} has: {', '.join(fields)}"


def _where(path: str, origin: dict) -> str:
    while path and path not in origin:
        path = path.rpartition(".")[0]
    return origin.get(path, "the run")


def known(run: RunConfig, origin: dict) -> RunConfig:
    """Return the run with all keys of its kinds, or refuse what they refuse; `origin`: the file that set a key."""
    if problem := checks.problem_of(run):
        raise ConfigError(f"{_where(problem[0], origin)}: {problem[1]}")
    return extensions.complete(run)


def explain(error: ValidationError, origin: dict) -> str:
    """Return a line for each problem; `origin`: the file that set a key."""
    lines = []
    for problem in error.errors():
        path = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "missing":
            lines.append(f"{_where(path, origin)}: {path}: a value is missing")
        elif problem["type"] == "value_error":
            lines.append(f"{_where(path, origin)}: {message}")
        elif problem["type"] == "int_parsing" and re.match(r"[\d_.]+ ?[A-Za-z]", str(problem["input"])):
            units = "write a whole number with K, M, B or T, such as 300M for 300,000,000"
            lines.append(f"{_where(path, origin)}: {path}={problem['input']!r}: {units}")
        else:
            quotes = (
                ". Put it in quotes"
                if problem["type"] == "string_type" and not isinstance(problem["input"], (dict, list))
                else ""
            )
            lines.append(
                f"{_where(path, origin)}: {path}={problem['input']!r}: {message[0].lower() + message[1:]}{quotes}"
            )
    return "\n".join(lines)
