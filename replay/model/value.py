"""The base of the values."""

import msgspec


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the values: frozen, comparable, closed to unknown fields."""
