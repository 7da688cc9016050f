"""What is measured: this engine, other programs, kernels. Only this folder of `experiments.bench` imports torch."""
