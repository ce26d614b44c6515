"""Options of a command, declared once: as the annotated fields of a dataclass, which Python code can make too."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin


def taking(options: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each field of a dataclass; the command receives the object as `options`.

    A field without a typer.Option is for Python only.
    """
    fields = inspect.signature(options, eval_str=True).parameters.values()
    declared = [_as_option(field) for field in fields if get_origin(field.annotation) is Annotated]

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            chosen = {option.name: given.pop(option.name) for option in declared}
            repeated = {name: tuple(value) for name, value in chosen.items() if isinstance(value, list)}
            run(**given, options=options(**{**chosen, **repeated}))

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(run, eval_str=True).parameters.values():
            parameters += declared if parameter.name == "options" else [parameter]
        keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        command.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
        command.__name__, command.__doc__ = run.__name__, run.__doc__
        return command

    return decorate


def _as_option(field: inspect.Parameter) -> inspect.Parameter:
    """Return a field as the parameter of a command: what Typer repeats is a list."""
    kind, option = get_args(field.annotation)
    return field.replace(annotation=Annotated[list[str] if get_origin(kind) is tuple else kind, option])
