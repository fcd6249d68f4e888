"""Studies: longer plans over the same children, for what a run of single cases cannot show."""
