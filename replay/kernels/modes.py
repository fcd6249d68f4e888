"""Which modes of the MoE stages a kernel has: those of int8 rows, or of bf16 ones."""

Modes = tuple[tuple[str, tuple[str, ...]], ...]

W8A8: Modes = (
    ("epilogue", ("row_then_col", "scales_first")),
    ("quant", ("recip_half_away", "recip_half_even", "div_half_even", "rmsnorm_int8")),
)
WIDE: Modes = (("epilogue", ("bf16",)), ("quant", ("bf16",)), ("shared", ("off",)))


def of_stage(stage: str) -> Modes:
    """What a kernel of int8 rows lists: nothing for moe.quantize, which has no other rows, and whose groups are a number."""
    return () if stage == "moe.quantize" else W8A8
