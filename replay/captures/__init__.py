"""What was captured: read it, check it, select from it, describe it."""

from replay.captures.cases import cases
from replay.captures.manifest import Capture, kinds, locate, open_capture
from replay.captures.routes import Batch, read_batches
from replay.captures.select import Select

__all__ = ["Batch", "Capture", "Select", "cases", "kinds", "locate", "open_capture", "read_batches"]
