"""One line each, under vLLM's logger where it has one, so that it stands among the server's own."""

import logging

_LOGGER = logging.getLogger("vllm.b70_replay")


def info(text: str, *values: object) -> None:
    """What a user may want to know."""
    _LOGGER.info("b70-replay: " + text, *values)


def error(text: str, *values: object) -> None:
    """What keeps something that was asked for from being done."""
    _LOGGER.error("b70-replay: " + text, *values)
