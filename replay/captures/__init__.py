"""What was captured: read it, check it, select from it, describe it."""

from replay.captures.cases import Select, cases
from replay.captures.manifest import Capture, locate, open_capture
from replay.captures.routes import Batch, read_batches

__all__ = ["Batch", "Capture", "Select", "cases", "locate", "open_capture", "read_batches"]
