"""Sources blended by megatron-core."""

import logging

from megatron_blackmamba.engine.parts.data import _without_warnings


def test_warnings_are_silenced_only_inside(caplog):
    logger = logging.getLogger("quiet")
    logger.setLevel(logging.INFO)
    with _without_warnings("quiet"):
        logger.warning("inside")
        logger.error("an error")
    logger.info("outside")
    assert [record.message for record in caplog.records] == ["an error", "outside"]
