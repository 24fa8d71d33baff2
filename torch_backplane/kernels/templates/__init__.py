"""Hand-written kernel templates, one file per operator family, in the common subset of the dialects."""
