"""Metrics of a step: each is a function with a name, in a file of this package or registered from elsewhere.

The terminal, metrics.jsonl, TensorBoard, wandb and the report show every metric that is here, without another edit
(docs/extending.md). A file in this package is found by itself. No torch at import: the report reads this too.
"""

from importlib import import_module
from pkgutil import iter_modules

from megatron_blackmamba.training.metrics.base import (
    Metric,
    MetricError,
    Taken,
    all_metrics,
    metric,
    metric_of,
    record,
    unregister,
)

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
