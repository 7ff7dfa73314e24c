"""What runs on the GPU during a handover: one Triton kernel that copies and sums any number of slices in one launch."""
