"""Who computes a convolution, Windrow or PyTorch: measured when a problem first comes."""
