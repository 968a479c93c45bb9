"""Which matrices MKOR preconditions, with their biases."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rankwise.mkor.factors import LayerSignature
from rankwise.options.validation import OptionError
from rankwise.sharding import MatrixTask
from rankwise.statistics.hooks import Record
from rankwise.step.table import ParameterTable
from rankwise.step.unit import StepUnit

__all__ = ["matrix_tasks"]

logger = logging.getLogger(__name__)


def matrix_tasks(
    unit: StepUnit, records: Mapping[str, Record], table: ParameterTable, backend: str
) -> list[MatrixTask]:
    """The unit's matrices; one whose bias is in the same param group of it takes it along.

    Args:
        unit: The unit.
        records: Of the captured weights, by name.
        table: The parameters.
        backend: For messages: what steps a bias that is left alone.

    Raises:
        OptionError: A matrix was not captured.
    """
    unknown = [key for key in unit.keys("matrix") if key not in records]
    if unknown:
        raise OptionError(
            f"MKOR has no statistics of {', '.join(unknown)}, added after the capture: call "
            "optimizer.capture(model) again after add_param_group."
        )
    tasks = []
    names = {id(parameter): name for name, parameter in table.parameters.items()}
    for key in unit.keys("matrix"):
        record, position = records[key], unit.group_position[key]
        bias = None
        if record.bias is not None:
            bias = _bundled(key, names.get(id(record.bias)), unit, table, backend)
        inputs, outputs, transposed = record.shape
        signature = LayerSignature(outputs, inputs, bias is not None, transposed, position)
        tasks.append(MatrixTask(key, (key,) if bias is None else (key, bias), signature, signature.cost))
    return tasks


def _bundled(key: str, bias: str | None, unit: StepUnit, table: ParameterTable, backend: str) -> str | None:
    if bias in unit.layout.shapes:
        return bias if unit.group_position[bias] == unit.group_position[key] else None
    if bias is not None and table.catalog[bias][1] == table.catalog[key][1]:
        logger.warning(
            "MKOR: '%s' is stepped apart from its weight and takes %s alone; a ZeRO-3 sub_group_size that keeps "
            "them together avoids it.",
            bias,
            backend,
        )
    return None
