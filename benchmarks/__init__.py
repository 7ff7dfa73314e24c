"""One script a claim; results with hardware, versions, date and command are in `results/`."""
